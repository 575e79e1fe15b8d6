//! Reasoning apart from content, however the text is cut.

use lily_engine::reasoning::{ReasoningSplitter, Split, prompt_opens_reasoning};
use proptest::prelude::*;

fn split<'a>(opened: bool, pieces: impl IntoIterator<Item = &'a str>) -> (String, String) {
    let mut splitter = ReasoningSplitter::new(opened);
    let (mut reasoning, mut content) = (String::new(), String::new());
    let mut take = |split: Split| {
        assert!(content.is_empty() || split.reasoning.is_empty(), "reasoning came after content");
        reasoning += &split.reasoning;
        content += &split.content;
    };
    pieces.into_iter().for_each(|piece| take(splitter.push(piece)));
    take(splitter.finish());
    (reasoning, content)
}

fn check(opened: bool, text: &str, reasoning: &str, content: &str) {
    assert_eq!(split(opened, [text]), (reasoning.to_owned(), content.to_owned()), "{text:?}");
}

#[test]
fn tags_and_the_newlines_around_them_belong_to_the_format() {
    check(true, "Let me see.\n\nSo.\n</think>\n\nIt is 4.\n", "Let me see.\n\nSo.", "It is 4.\n");
    check(false, "\n<think>\nHm.\n</think>\n\n4", "Hm.", "4");
    check(true, "\n</think>\n\n4", "", "4");
    check(false, "<think></think>  indented", "", "  indented");
}

#[test]
fn without_a_block_everything_is_content() {
    check(false, "\n\n 4 < 5 <think> no", "", "\n\n 4 < 5 <think> no");
    check(false, "", "", "");
    check(false, " <thi", "", " <thi");
}

#[test]
fn only_the_first_block_is_reasoning() {
    check(true, "a</think>b<think>c</think>d", "a", "b<think>c</think>d");
}

#[test]
fn an_unfinished_block_is_reasoning_with_its_last_characters() {
    check(true, "still </thin", "still </thin", "");
    check(true, "still\n\n", "still", "");
}

#[test]
fn reasoning_is_given_out_at_once() {
    let mut splitter = ReasoningSplitter::new(true);
    assert_eq!(splitter.push("one <").reasoning, "one ");
    assert_eq!(splitter.push("b>\n").reasoning, "<b>");
    assert_eq!(splitter.push("\ntwo").reasoning, "\n\ntwo");
    assert!(splitter.in_reasoning());
    assert_eq!(splitter.push("</think>").reasoning, "");
    assert!(!splitter.in_reasoning());
    assert_eq!(splitter.push("\n\n\n4").content, "4");
}

#[test]
fn the_prompt_tells_whether_reasoning_is_open() {
    assert!(prompt_opens_reasoning("<|im_start|>assistant\n<think>\n"));
    assert!(!prompt_opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    assert!(!prompt_opens_reasoning("<|im_start|>assistant\n"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn every_cut_gives_the_same(
        opened: bool,
        parts in prop::collection::vec(
            prop::sample::select(vec!["<think>", "</think>", "<", "</thi", "nk>", "\n", "\n\n", " ", "x", "é"]),
            0..12,
        ),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let text = parts.concat();
        let mut cuts: Vec<usize> =
            cuts.iter().map(|i| i.index(text.len() + 1)).filter(|&i| text.is_char_boundary(i)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort();
        let pieces = cuts.windows(2).map(|w| &text[w[0]..w[1]]);
        let (reasoning, content) = split(opened, pieces);
        prop_assert_eq!((&reasoning, &content), {
            let whole = split(opened, [text.as_str()]);
            (&whole.0.clone(), &whole.1.clone())
        });
        prop_assert!(!reasoning.contains("</think>"));
        prop_assert!(!reasoning.starts_with('\n') && !reasoning.ends_with('\n'));
    }
}
