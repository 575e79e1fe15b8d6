//! The conformance program on a Mac's own GPU.
#![cfg(target_os = "macos")]

mod conformance;

use conformance::{Expected, Recall};
use lily_gpu::layout::KvFormat;
use lily_metal::apple::AppleDevice;

fn gpu() -> AppleDevice {
    AppleDevice::open(0).expect("a Mac with an Apple GPU of the M1 or later")
}

#[test]
fn the_demo_answers_as_plain_f32_does() {
    let expected = Expected::new();
    for together in [false, true] {
        conformance::greedy_tokens_are_those_of_plain_f32(&gpu(), &expected, together);
    }
}

#[test]
fn a_long_prompt_is_answered_as_on_the_cpu_whatever_it_is_cut_into() {
    let cuts: [&[usize]; 5] = [&[2048], &[512], &[256], &[64], &[300, 1, 97, 640, 33]];
    let questions = [
        Recall::of("recall_1k", 900..1_100, KvFormat::F16),
        Recall::of("recall_4k", 3_900..4_400, KvFormat::F16),
        Recall::of("recall_4k", 3_900..4_400, KvFormat::Q8),
    ];
    for recall in questions {
        for pieces in cuts {
            conformance::a_long_prompt_is_answered_as_on_the_cpu(&gpu(), &recall, pieces);
        }
    }
}

#[test]
fn prompts_in_8_bits_are_answered_as_on_the_cpu() {
    for family in ["no_tool", "tool_answer"] {
        conformance::a_prompt_in_8_bits_is_answered_as_on_the_cpu(&gpu(), family, 100);
    }
}

#[test]
fn the_same_tokens_give_the_same_bits() {
    for kv in [KvFormat::F16, KvFormat::Q8] {
        conformance::the_same_tokens_give_the_same_bits(&gpu(), kv, [140, 61]);
    }
}

#[test]
fn chosen_tokens_are_the_hosts() {
    conformance::chosen_tokens_are_the_hosts(&gpu(), 60);
}

#[test]
fn an_engine_answers_alike_whoever_chooses() {
    conformance::an_engine_answers_alike_whoever_chooses(&gpu(), 60);
}

#[test]
fn what_is_no_number_is_no_token() {
    conformance::what_is_no_number_is_no_token(&gpu());
}

#[test]
fn a_timed_step_gives_what_a_step_gives() {
    conformance::a_timed_step_gives_what_a_step_gives(&gpu());
}
