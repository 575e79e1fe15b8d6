//! Tokens become text one at a time, and the pieces are exactly the whole.

use std::path::Path;
use std::sync::LazyLock;

use lily_model::detokenizer::Detokenizer;
use lily_model::tokenizer::{Tokenizer, TokenizerError, markers};
use proptest::prelude::*;
use serde_json::{Value, json};

static TOKENIZER_JSON: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../demo/checkpoint/tokenizer.json");
    std::fs::read(Path::new(path)).unwrap()
});

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_bytes(&TOKENIZER_JSON).unwrap());

/// The `tokenizers` crate itself, as the judge of encoding and decoding.
static LIBRARY: LazyLock<tokenizers::Tokenizer> =
    LazyLock::new(|| tokenizers::Tokenizer::from_bytes(&*TOKENIZER_JSON).unwrap());

/// What `tokens` say up to and including each of them.
fn pushed(tokens: &[u32]) -> (Vec<String>, String) {
    let mut detokenizer = Detokenizer::new(TOKENIZER.clone());
    let pieces = tokens.iter().map(|&token| detokenizer.push(token)).collect();
    (pieces, detokenizer.finish())
}

/// Ids of the vocabulary, single bytes (which often make no character) more often than chance would have
/// it, and a few ids that do not exist.
fn any_token() -> impl Strategy<Value = u32> {
    let size = TOKENIZER.vocab_size() as u32;
    let bytes: Vec<u32> =
        (0..size).filter(|&id| TOKENIZER.token_bytes(id).is_some_and(|b| b.len() == 1)).collect();
    prop_oneof![4 => 0..size + 20, 4 => prop::sample::select(bytes), 1 => size - 20..size]
}

/// Texts of all of Unicode, and of the scripts and marks that share bytes, combine or change under
/// normalisation.
fn any_text() -> impl Strategy<Value = String> {
    let pieces = [
        "a",
        " ",
        "\n",
        "é",
        "e\u{301}",
        "ß",
        "日本",
        "🙂",
        "👩\u{200d}🚀",
        "\u{fffd}",
        "\0",
        "<think>",
        "ﬁ",
        "한",
    ];
    prop_oneof![
        any::<String>(),
        prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..24)
            .prop_map(|pieces| pieces.concat()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn pieces_joined_are_the_decoded_whole(tokens in prop::collection::vec(any_token(), 0..64)) {
        let (pieces, tail) = pushed(&tokens);
        prop_assert_eq!(pieces.concat() + &tail, TOKENIZER.decode(&tokens));
    }

    #[test]
    fn decoding_is_the_library_s(tokens in prop::collection::vec(any_token(), 0..64)) {
        prop_assert_eq!(TOKENIZER.decode(&tokens), LIBRARY.decode(&tokens, true).unwrap());
        prop_assert_eq!(TOKENIZER.decode_with_special(&tokens), LIBRARY.decode(&tokens, false).unwrap());
    }

    #[test]
    fn no_complete_character_is_held_back(text in any_text()) {
        // After each token everything is out but the bytes that begin an unfinished character.
        let tokens = TOKENIZER.encode_plain(&text);
        let (pieces, tail) = pushed(&tokens);
        prop_assert_eq!(tail, "");
        let mut bytes = Vec::new();
        let mut given = String::new();
        for (token, piece) in tokens.iter().zip(pieces) {
            bytes.extend(TOKENIZER.token_bytes(*token).unwrap());
            given += &piece;
            let complete = match std::str::from_utf8(&bytes) {
                Ok(all) => all,
                Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap(),
            };
            prop_assert_eq!(given.as_str(), complete);
        }
    }

    #[test]
    fn encoding_is_the_library_s(text in any_text()) {
        let expected = LIBRARY.encode(text.as_str(), false).unwrap();
        prop_assert_eq!(TOKENIZER.encode(&text), expected.get_ids());
    }

    #[test]
    fn plain_text_comes_back_and_never_becomes_a_marker(text in any_text()) {
        let tokens = TOKENIZER.encode_plain(&text);
        let first_marker = TOKENIZER.token_id(markers::END_OF_TEXT).unwrap();
        prop_assert!(tokens.iter().all(|&token| token < first_marker));
        // The vocabulary is of normalised text, so that is what comes back.
        let mut normalised = tokenizers::NormalizedString::from(text.as_str());
        let normalizer = LIBRARY.get_normalizer().unwrap();
        tokenizers::Normalizer::normalize(normalizer, &mut normalised).unwrap();
        prop_assert_eq!(TOKENIZER.decode(&tokens), normalised.get());
    }

    #[test]
    fn a_tokenizer_file_with_flipped_bytes_is_read_or_refused(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut damaged = TOKENIZER_JSON.clone();
        for (at, byte) in flips {
            let at = at.index(damaged.len());
            damaged[at] = byte;
        }
        if let Ok(tokenizer) = Tokenizer::from_bytes(&damaged) {
            tokenizer.decode(&tokenizer.encode("Grüße, 17 + 25 <think>"));
        }
    }
}

#[test]
fn a_character_in_four_tokens_comes_out_with_the_last() {
    let byte_token = |byte: u8| (0..256).find(|&id| TOKENIZER.token_bytes(id) == Some(vec![byte])).unwrap();
    let tokens: Vec<u32> = "🙂".bytes().map(byte_token).collect();
    assert_eq!(pushed(&tokens), (vec!["".into(), "".into(), "".into(), "🙂".into()], String::new()));
    // Cut short, it is one mark at the end; broken off, one mark at once.
    assert_eq!(pushed(&tokens[..3]), (vec![String::new(); 3], "\u{fffd}".to_string()));
    let (pieces, tail) = pushed(&[tokens[0], tokens[1], byte_token(b'a')]);
    assert_eq!((pieces[2].as_str(), tail.as_str()), ("\u{fffd}a", ""));
}

#[test]
fn special_tokens_are_silent_and_other_markers_are_text() {
    let id = |marker| TOKENIZER.token_id(marker).unwrap();
    let tokens =
        [id(markers::IM_START), id(markers::THINK_START), id(markers::IM_END), id(markers::THINK_END)];
    assert_eq!(pushed(&tokens).0, ["", "<think>", "", "</think>"]);
    assert_eq!(TOKENIZER.decode_with_special(&tokens), "<|im_start|><think><|im_end|></think>");
    assert_eq!(TOKENIZER.encode("<|im_start|><think><|im_end|></think>"), tokens);
}

#[test]
fn a_space_that_leads_is_kept() {
    for text in [" a", "  a", "\n a", "a ", " "] {
        let (pieces, tail) = pushed(&TOKENIZER.encode(text));
        assert_eq!(pieces.concat() + &tail, text);
    }
}

#[test]
fn endless_white_space_is_encoded_and_so_is_what_follows() {
    let words = "after, one two<|im_end|>";
    let text = format!("before{}{words}", " ".repeat(1_100_000));
    let expected = TOKENIZER.encode(&format!(" {words}"));
    assert!(TOKENIZER.encode(&text).ends_with(&expected));
    assert_eq!(TOKENIZER.decode_with_special(&TOKENIZER.encode(&text)), text);
    assert_eq!(TOKENIZER.decode(&TOKENIZER.encode_plain(&text)), text);
}

#[test]
fn a_tokenizer_of_another_kind_is_refused_by_name() {
    let with = |change: &dyn Fn(&mut Value)| {
        let mut file: Value = serde_json::from_slice(&TOKENIZER_JSON).unwrap();
        change(&mut file);
        Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap_err()
    };
    for (part, content, complaint) in [
        (
            "model",
            json!({ "type": "WordLevel", "vocab": { "a": 0 }, "unk_token": "a" }),
            "a model of type WordLevel",
        ),
        ("decoder", json!({ "type": "Fuse" }), "a decoder of type Fuse"),
        ("decoder", Value::Null, "a decoder missing"),
        ("normalizer", json!({ "type": "Lowercase" }), "a normalizer of type Lowercase"),
        ("pre_tokenizer", json!({ "type": "Whitespace" }), "a pre-tokenizer of type Whitespace"),
    ] {
        let error = with(&|file| file[part] = content.clone()).to_string();
        assert!(error.contains(complaint), "{error}");
    }
    let byte = with(&|file| {
        file["model"]["merges"] = json!([]);
        file["model"]["vocab"].as_object_mut().unwrap().shift_remove("Ġ");
    });
    assert!(matches!(byte, TokenizerError::MissingByte(b' ')), "{byte}");
}

#[test]
fn a_file_that_is_no_tokenizer_is_an_error() {
    let deep = "[".repeat(100_000);
    let half = &TOKENIZER_JSON[..TOKENIZER_JSON.len() / 2];
    for file in [b"".as_slice(), b"{}", b"null", b"\xff\xfe", deep.as_bytes(), half] {
        assert!(matches!(Tokenizer::from_bytes(file), Err(TokenizerError::Malformed(_))));
    }
}

#[test]
fn truncation_and_padding_in_the_file_do_not_touch_a_prompt() {
    let mut file: Value = serde_json::from_slice(&TOKENIZER_JSON).unwrap();
    file["truncation"] =
        json!({ "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 });
    file["padding"] = json!({
        "strategy": { "Fixed": 64 }, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    });
    let tokenizer = Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap();
    let text = "one two three four five";
    assert_eq!(tokenizer.encode(text), TOKENIZER.encode(text));
}
