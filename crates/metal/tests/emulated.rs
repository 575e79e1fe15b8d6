//! The whole demo model on the emulated GPU, through the Metal plan, the host and its two token slots.
//!
//! What takes minutes is ignored here, and run by `.ci/run` with `--ignored`.
#![cfg(target_os = "linux")]

mod conformance;

use std::sync::LazyLock;

use conformance::{Expected, Recall};
use lily_gpu::layout::KvFormat;
use lily_metal::emulator::{Emulator, Options};

fn gpu(seed: u64, tracked: bool) -> Emulator {
    Emulator::new(Options { seed, tracked }).unwrap()
}

#[test]
fn an_answer_of_the_demo_is_that_of_plain_f32() {
    let expected = Expected::of(&["sum"], 48);
    conformance::greedy_tokens_are_those_of_plain_f32(&gpu(1, false), &expected, false);
}

#[test]
#[ignore = "a minute or more of computing; .ci/run runs it"]
fn all_answers_of_the_demo_are_those_of_plain_f32_under_three_seeds() {
    let expected = Expected::new();
    for (seed, together) in [(1, true), (2, false), (3, true)] {
        conformance::greedy_tokens_are_those_of_plain_f32(&gpu(seed, false), &expected, together);
    }
}

/// A question about a text of 4,000 tokens, what the CPU answers, and the logits of whoever of the tests below was first.
static RECALL: LazyLock<Recall> = LazyLock::new(|| Recall::of("recall_4k", 3_900..4_400, KvFormat::F16));

#[test]
fn a_prompt_in_8_bits_is_answered_as_on_the_cpu() {
    conformance::a_prompt_in_8_bits_is_answered_as_on_the_cpu(&gpu(12, false), "no_tool", 100);
}

#[test]
#[ignore = "a minute or more of computing; .ci/run runs it"]
fn a_prompt_of_4000_tokens_is_answered_as_on_the_cpu_in_pieces_of_64() {
    conformance::a_long_prompt_is_answered_as_on_the_cpu(&gpu(11, false), &RECALL, &[64]);
}

#[test]
#[ignore = "a minute or more of computing; .ci/run runs it"]
fn a_prompt_of_4000_tokens_is_answered_as_on_the_cpu_in_pieces_of_256() {
    conformance::a_long_prompt_is_answered_as_on_the_cpu(&gpu(12, false), &RECALL, &[256]);
}

#[test]
#[ignore = "a minute or more of computing; .ci/run runs it"]
fn a_prompt_of_4000_tokens_is_answered_as_on_the_cpu_in_pieces_of_512() {
    conformance::a_long_prompt_is_answered_as_on_the_cpu(&gpu(13, false), &RECALL, &[512]);
}

#[test]
#[ignore = "a minute or more of computing; .ci/run runs it"]
fn a_prompt_of_4000_tokens_is_answered_as_on_the_cpu_in_uneven_pieces() {
    conformance::a_long_prompt_is_answered_as_on_the_cpu(&gpu(14, false), &RECALL, &[300, 1, 97, 640, 33]);
}

#[test]
#[ignore = "half a minute or more of computing; .ci/run runs it"]
fn a_prompt_of_4000_tokens_in_8_bits_is_answered_as_on_the_cpu_with_8_bits() {
    let recall = Recall::of("recall_4k", 3_900..4_400, KvFormat::Q8);
    conformance::a_long_prompt_is_answered_as_on_the_cpu(&gpu(13, false), &recall, &[512]);
}

#[test]
fn the_same_tokens_give_the_same_bits() {
    conformance::the_same_tokens_give_the_same_bits(&gpu(4, false), KvFormat::F16, [70, 9]);
    conformance::the_same_tokens_give_the_same_bits(&gpu(11, false), KvFormat::Q8, [70, 9]);
}

#[test]
#[ignore = "a minute or more of computing; .ci/run runs it"]
fn the_same_tokens_give_the_same_bits_and_no_thread_does_what_it_must_not() {
    conformance::the_same_tokens_give_the_same_bits(&gpu(5, true), KvFormat::F16, [70, 9]);
}

#[test]
fn chosen_tokens_are_the_hosts() {
    conformance::chosen_tokens_are_the_hosts(&gpu(7, false), 4);
}

#[test]
#[ignore = "a minute or more of computing; .ci/run runs it"]
fn chosen_tokens_are_the_hosts_and_no_thread_does_what_it_must_not() {
    conformance::chosen_tokens_are_the_hosts(&gpu(8, true), 1);
}

#[test]
fn an_engine_answers_alike_whoever_chooses() {
    conformance::an_engine_answers_alike_whoever_chooses(&gpu(10, false), 3);
}

#[test]
fn what_is_no_number_is_no_token() {
    conformance::what_is_no_number_is_no_token(&gpu(9, false));
}

#[test]
fn a_timed_step_gives_what_a_step_gives() {
    conformance::a_timed_step_gives_what_a_step_gives(&gpu(6, false));
}
