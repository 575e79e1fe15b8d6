//! Stop strings: the same end and the same text however the answer is cut, and nothing held longer than needed.

use lily_engine::stop::{InvalidStop, MAX_STOP_BYTES, MAX_STOP_STRINGS, StopMatcher};
use proptest::prelude::*;

fn matcher(stops: &[&str]) -> StopMatcher {
    StopMatcher::new(stops.iter().map(|s| s.to_string()).collect()).unwrap()
}

/// The definition: read character by character until some stop string is complete; the longest wins.
fn naive(stops: &[String], text: &str) -> (String, bool) {
    for end in (0..=text.len()).filter(|&i| text.is_char_boundary(i)) {
        let complete = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
        if let Some(longest) = complete.map(|stop| stop.len()).max() {
            return (text[..end - longest].to_owned(), true);
        }
    }
    (text.to_owned(), false)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn every_cut_gives_what_a_search_of_the_whole_text_gives(
        stops in prop::collection::vec("[abé]{1,4}", 0..4),
        pieces in prop::collection::vec("[abcé]{0,5}", 0..12),
    ) {
        let mut matcher = StopMatcher::new(stops.clone()).unwrap();
        let (mut text, mut pushed, mut stopped) = (String::new(), String::new(), false);
        for piece in &pieces {
            pushed += piece;
            let released = matcher.push(piece);
            text += &released.text;
            stopped = released.stopped;
            if !stopped {
                // Held text must be the beginning of a stop string, or it should have been let go.
                let held = &pushed[text.len()..];
                prop_assert!(held.is_empty() || stops.iter().any(|s| s.starts_with(held) && s != held));
            }
        }
        text += &matcher.finish();
        prop_assert_eq!((text, stopped), naive(&stops, &pieces.concat()));
    }
}

#[test]
fn a_stop_string_is_found_across_pieces_and_is_not_shown() {
    let mut matcher = matcher(&["never", "\nUser:"]);
    assert_eq!(matcher.push("Hello\nUs").text, "Hello");
    assert_eq!(matcher.found(), None);
    assert_eq!(matcher.push("eful").text, "\nUseful");
    assert_eq!(matcher.push(" text\nUser").text, " text");
    let released = matcher.push(": more");
    assert_eq!((released.text.as_str(), released.stopped, matcher.found()), ("", true, Some(1)));
    assert_eq!(matcher.push("anything").text, "");
    assert_eq!(matcher.finish(), "");
}

#[test]
fn lists_that_cannot_be_used_are_refused() {
    let refused = |stops: Vec<String>| StopMatcher::new(stops).unwrap_err();
    assert_eq!(refused(vec!["a".into(), String::new()]), InvalidStop::Empty { index: 1 });
    let count = MAX_STOP_STRINGS + 1;
    assert_eq!(refused(vec!["a".into(); count]), InvalidStop::TooMany { count });
    let bytes = MAX_STOP_BYTES + 1;
    assert_eq!(refused(vec!["a".repeat(bytes)]), InvalidStop::TooLong { index: 0, bytes });
}
