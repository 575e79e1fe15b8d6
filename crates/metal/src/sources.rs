//! The kernels' sources, as they are embedded in the program, and the macros that make them this model's.
//!
//! Metal compiles text and knows no files, so what a kernel includes of Lily's own is put in its place, once each;
//! `#line` keeps the compiler's messages at the right file and line.

use std::fmt::Write;

use lily_gpu::layout::KvFormat;
use lily_gpu::macros::macros;
use lily_gpu::stage::Stage;
use lily_model::geometry::Geometry;
use lily_model::weights::GROUP_SIZE;

use crate::device::Source;
use crate::error::MetalError;

/// Inputs that a lane takes at once, lanes of a SIMD-group, and inputs that fit threadgroup memory (`product.h`).
const PIECE: usize = 32;
const SIMD: usize = 32;
const MOST_INPUTS: usize = 4096;

/// What the kernels include.
const HEADERS: [(&str, &str); 7] = [
    ("attention.h", include_str!("../kernels/attention.h")),
    ("choice.h", include_str!("../kernels/choice.h")),
    ("common.h", include_str!("../kernels/common.h")),
    ("float64.h", include_str!("../kernels/float64.h")),
    ("gemm.h", include_str!("../kernels/gemm.h")),
    ("product.h", include_str!("../kernels/product.h")),
    ("prompt.h", include_str!("../kernels/prompt.h")),
];

/// The file of a stage: its name and its text.
pub fn file(stage: Stage) -> (&'static str, &'static str) {
    macro_rules! file {
        ($name:literal) => {
            ($name, include_str!(concat!("../kernels/", $name)))
        };
    }
    match stage {
        Stage::Embed => file!("embed.metal"),
        Stage::DeltaIn => file!("delta_in.metal"),
        Stage::DeltaCore => file!("delta_core.metal"),
        Stage::DeltaOut => file!("delta_out.metal"),
        Stage::AttnIn => file!("attn_in.metal"),
        Stage::AttnCore => file!("attn_core.metal"),
        Stage::AttnOut => file!("attn_out.metal"),
        Stage::MoeRoute => file!("moe_route.metal"),
        Stage::MoeUp => file!("moe_up.metal"),
        Stage::MoeDown => file!("moe_down.metal"),
        Stage::Head => file!("head.metal"),
        Stage::Sample => file!("sample.metal"),
    }
}

/// What a device compiles for a stage of a model whose keys and values are stored as `kv` says.
pub fn source(stage: Stage, geometry: &Geometry, kv: KvFormat) -> Source {
    let (name, text) = file(stage);
    let mut source = complete(name, text, geometry);
    // No other stage sees them, and what it is compiled to is the same for both.
    if stage == Stage::AttnCore {
        source.macros.push(("KV_Q8".to_owned(), u8::from(kv == KvFormat::Q8).to_string()));
    }
    source
}

/// What a device compiles to compare its matrix units ([`tensors`](crate::tensors)).
pub fn products_check(geometry: &Geometry) -> Source {
    complete("products_check.metal", include_str!("../kernels/products_check.metal"), geometry)
}

/// A file that may include what the kernels include, as a device compiles it for a model.
pub fn complete(name: &str, text: &str, geometry: &Geometry) -> Source {
    let mut whole = String::new();
    let macros = macros(geometry).into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    inline(&mut whole, &mut Vec::new(), name, text);
    Source { name: name.to_owned(), text: whole, macros }
}

/// Appends `text` to `out` with its own headers in place, each where it is included first.
fn inline(out: &mut String, included: &mut Vec<&'static str>, name: &str, text: &str) {
    writeln!(out, "#line 1 \"{name}\"").expect("a string takes what is written");
    for (number, line) in text.lines().enumerate() {
        let header = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
        let header = header.and_then(|header| HEADERS.into_iter().find(|(known, _)| *known == header));
        match header {
            Some((header, text)) if !included.contains(&header) => {
                included.push(header);
                inline(out, included, header, text);
                writeln!(out, "#line {} \"{name}\"", number + 2).expect("a string takes what is written");
            }
            // What is included a second time, and the line that would prevent it.
            Some(_) => out.push('\n'),
            None if line == "#pragma once" => out.push('\n'),
            None => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
}

/// Refuses models that the kernels are not written for.
pub fn check(geometry: &Geometry) -> Result<(), MetalError> {
    let Geometry { hidden, attention, delta, moe, .. } = geometry;
    let inputs = [*hidden, attention.heads * attention.head_dim, delta.value_width(), moe.expert_width];
    let needs = [
        (attention.head_dim == 256 && attention.rotary_dim == 64, "attention heads of 256, of which 64 turn"),
        (attention.heads == 8 * attention.kv_heads, "eight query heads for each KV head"),
        (
            delta.key_dim == 128 && delta.value_dim == 128 && delta.conv_width == 4,
            "DeltaNet heads of 128 and four taps",
        ),
        (delta.value_heads.is_multiple_of(delta.key_heads), "as many value heads for each key head"),
        (
            moe.top_k == 8 && moe.experts.is_multiple_of(4) && moe.experts <= 256,
            "8 of at most 256 experts, a multiple of 4",
        ),
        (moe.shared_width == moe.expert_width, "experts as wide as the shared one"),
        (
            inputs.into_iter().all(|width| {
                let pieces = width / PIECE;
                width.is_multiple_of(GROUP_SIZE)
                    && width <= MOST_INPUTS
                    && (pieces.is_power_of_two() || pieces.is_multiple_of(SIMD))
            }),
            "rows of at most 4096 inputs that lanes share evenly",
        ),
        (geometry.max_context <= 1 << 24, "at most 2^24 positions"),
    ];
    match needs.iter().find(|(holds, _)| !holds) {
        Some((_, what)) => Err(MetalError::Model(format!("its kernels need {what}"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use lily_gpu::decode::{MAX_ROWS, SPANS};
    use lily_gpu::layout::PAGE_TOKENS;
    use lily_model::checkpoint::Checkpoint;

    use super::*;

    #[test]
    fn a_header_stands_where_it_is_included_first_and_lines_keep_their_numbers() {
        let source = source(Stage::Head, &Geometry::qwen3_6_35b_a3b(), KvFormat::F16);
        assert_eq!(source.text.matches("#line 1 \"common.h\"").count(), 1);
        assert!(!source.text.contains("#include \"") && !source.text.contains("#pragma once"));
        let (_, file) = file(Stage::Head);
        let number = 1 + file.lines().position(|line| line.starts_with("kernel void head(")).unwrap();
        // The line that the compiler takes it for.
        let mut at = 0;
        for line in source.text.lines() {
            at = match line.strip_prefix("#line ").and_then(|rest| rest.split_once(' ')) {
                Some((next, _)) => next.parse::<usize>().unwrap() - 1,
                None => at + 1,
            };
            if line.starts_with("kernel void head(") {
                assert_eq!(at, number);
                return;
            }
        }
        panic!("the kernel is not there");
    }

    #[test]
    fn the_model_and_the_demo_are_what_the_kernels_are_written_for() {
        check(&Geometry::qwen3_6_35b_a3b()).unwrap();
        let mut geometry = Checkpoint::demo().unwrap().geometry().clone();
        check(&geometry).unwrap();
        geometry.moe.expert_width = 96;
        geometry.moe.shared_width = 96;
        assert!(check(&geometry).unwrap_err().to_string().contains("lanes share evenly"));
    }

    #[test]
    fn headers_and_host_have_the_same_constants() {
        let (_, common) = HEADERS.into_iter().find(|(name, _)| *name == "common.h").unwrap();
        let constants = [("MAX_ROWS", MAX_ROWS), ("SPANS", SPANS), ("PAGE_TOKENS", PAGE_TOKENS)];
        for (name, value) in constants {
            assert!(common.contains(&format!("constexpr int {name} = {value};")), "{name}");
        }
    }
}
