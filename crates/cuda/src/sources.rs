//! The kernels' sources, as they are embedded in the program, and the macros that make them this model's.

use lily_gpu::decode::{MAX_ROWS, SPANS};
use lily_gpu::layout::{KvFormat, PAGE_TOKENS};
use lily_gpu::macros::macros;
use lily_gpu::prefill::cuda::{
    BLOCK_TILES, COLUMN, COUNT_WORDS, DELTA_ROWS, PARTIALS, RUN_ROWS, SELECT_ROWS, SORT_ROWS,
};
use lily_gpu::stage::Stage;
use lily_model::geometry::Geometry;

use crate::error::CudaError;

/// What the kernels include.
pub const HEADERS: [(&str, &str); 13] = [
    ("common.cuh", include_str!("../kernels/common.cuh")),
    ("tiles.cuh", include_str!("../kernels/tiles.cuh")),
    ("choice.cuh", include_str!("../kernels/choice.cuh")),
    ("delta.cuh", include_str!("../kernels/delta.cuh")),
    ("delta_chunk.cuh", include_str!("../kernels/delta_chunk.cuh")),
    ("kv8.cuh", include_str!("../kernels/kv8.cuh")),
    ("attention.cuh", include_str!("../kernels/attention.cuh")),
    ("attn_mma.cuh", include_str!("../kernels/attn_mma.cuh")),
    ("attn_wgmma.cuh", include_str!("../kernels/attn_wgmma.cuh")),
    ("prompt.cuh", include_str!("../kernels/prompt.cuh")),
    ("gemm.cuh", include_str!("../kernels/gemm.cuh")),
    ("gemm_mma.cuh", include_str!("../kernels/gemm_mma.cuh")),
    ("gemm_wgmma.cuh", include_str!("../kernels/gemm_wgmma.cuh")),
];

/// A file of kernels, compiled by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct File {
    /// Its name without the ending.
    pub name: &'static str,
    /// What it says.
    pub text: &'static str,
}

macro_rules! files {
    ($($name:literal)*) => {
        [$(File { name: $name, text: include_str!(concat!("../kernels/", $name, ".cu")) }),*]
    };
}

/// All of them: one for each stage of decode; and for prompts one for each stage but that the dense projections share
/// theirs.
pub const FILES: [File; 19] = files![
    "embed" "delta_in" "delta_core" "delta_out" "attn_in" "attn_core" "attn_out" "moe_route" "moe_up" "moe_down" "head"
    "sample" "embed_prefill" "dense_prefill" "delta_core_prefill" "attn_core_prefill" "moe_route_prefill"
    "moe_up_prefill" "moe_down_prefill"
];

/// Whether a kernel belongs to the program of prompts.
pub fn is_prefill(kernel: &str) -> bool {
    kernel.ends_with("_prefill")
}

/// The name of the file in which a kernel of a stage stands.
pub fn file_of(kernel: &str, stage: Stage) -> &'static str {
    match (kernel, stage) {
        // It writes a batch's keys, and stands beside the kernel that reads them.
        ("attn_kv_batch", _) => "attn_core",
        ("dense_prefill" | "round_prefill", _) => "dense_prefill",
        (kernel, stage) if is_prefill(kernel) => match stage {
            Stage::Embed => "embed_prefill",
            Stage::DeltaCore => "delta_core_prefill",
            Stage::AttnCore => "attn_core_prefill",
            Stage::MoeRoute => "moe_route_prefill",
            Stage::MoeUp => "moe_up_prefill",
            Stage::MoeDown => "moe_down_prefill",
            stage => stage.name(),
        },
        (_, stage) => stage.name(),
    }
}

/// What the kernels are cut to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chip {
    /// The compiler's name of the architecture.
    pub architecture: String,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that one block may have.
    pub shared_bytes: u32,
}

/// The compiler's flags for a model on a chip whose keys and values are stored as `kv` says.
pub fn flags(geometry: &Geometry, kv: KvFormat, chip: &Chip) -> Vec<String> {
    let kv_bits = match kv {
        KvFormat::F16 => 16,
        KvFormat::Q8 => 8,
    };
    let others = [
        ("KV_BITS", kv_bits.to_string()),
        ("MULTIPROCESSORS", chip.multiprocessors.to_string()),
        ("SHARED_LIMIT", chip.shared_bytes.to_string()),
    ];
    let mut flags =
        vec![format!("-arch={}", chip.architecture), "-std=c++17".to_owned(), "-default-device".to_owned()];
    let defined = macros(geometry).into_iter().chain(others);
    flags.extend(defined.map(|(name, value)| format!("-D{name}={value}")));
    flags
}

/// Refuses models that the kernels are not written for.
pub fn check(geometry: &Geometry) -> Result<(), CudaError> {
    let Geometry { hidden, attention, delta, moe, .. } = geometry;
    let width = attention.heads * attention.head_dim;
    let needs = [
        (attention.head_dim == 256 && attention.rotary_dim == 64, "attention heads of 256, of which 64 turn"),
        (attention.heads == 8 * attention.kv_heads, "eight query heads for each KV head"),
        (
            delta.key_dim == 128 && delta.value_dim == 128 && delta.conv_width == 4,
            "DeltaNet heads of 128 and four taps",
        ),
        (delta.value_heads.is_multiple_of(delta.key_heads), "as many value heads for each key head"),
        (
            moe.top_k == 8 && moe.experts.is_multiple_of(32) && moe.experts <= 256,
            "8 of at most 256 experts, a multiple of 32",
        ),
        (
            moe.shared_width == moe.expert_width
                && moe.expert_width.is_multiple_of(32)
                && moe.expert_width <= 512,
            "experts as wide as the shared one, at most 512 and a multiple of 32",
        ),
        (hidden.is_multiple_of(128) && *hidden <= 2048, "a width of at most 2048, a multiple of 128"),
        (width.max(delta.value_width()) <= 4096, "mixers of at most 4096"),
        (geometry.vocab <= 1 << 19, "a vocabulary of at most 2^19"),
        (geometry.max_context <= 1 << 24, "at most 2^24 positions"),
    ];
    match needs.iter().find(|(holds, _)| !holds) {
        Some((_, what)) => Err(CudaError::Model(format!("its kernels need {what}"))),
        None => Ok(()),
    }
}

/// What the kernels say themselves and the host must agree with.
pub const CONSTANTS: [(&str, usize); 12] = [
    ("MAX_ROWS", MAX_ROWS),
    ("SPANS", SPANS),
    ("PAGE_TOKENS", PAGE_TOKENS),
    ("BLOCK_TILES", BLOCK_TILES),
    ("COLUMN", COLUMN),
    ("COUNT_WORDS", COUNT_WORDS),
    ("SELECT_ROWS", SELECT_ROWS),
    ("SORT_ROWS", SORT_ROWS),
    ("CHUNK_TOKENS", DELTA_ROWS),
    ("MOST_PARTS", PARTIALS),
    ("RUN_TOKENS", *RUN_ROWS.start()),
    ("RUN_TOKENS", *RUN_ROWS.end()),
];

#[cfg(test)]
mod tests {
    use super::*;
    use lily_model::checkpoint::Checkpoint;

    #[test]
    fn headers_and_host_have_the_same_constants() {
        let texts = || HEADERS.iter().map(|(_, text)| *text).chain(FILES.iter().map(|file| file.text));
        for (name, value) in CONSTANTS {
            let line = format!("constexpr int {name} = {value};");
            assert!(texts().any(|text| text.contains(&line)), "{name}");
        }
    }

    #[test]
    fn the_model_and_the_demo_are_what_the_kernels_are_written_for() {
        check(&Geometry::qwen3_6_35b_a3b()).unwrap();
        let mut geometry = Checkpoint::demo().unwrap().geometry().clone();
        check(&geometry).unwrap();
        geometry.moe.top_k = 4;
        assert!(check(&geometry).unwrap_err().to_string().contains("8 of at most 256 experts"));
    }

    #[test]
    fn the_flags_name_the_geometry() {
        let chip = Chip { architecture: "sm_90a".into(), multiprocessors: 132, shared_bytes: 232_448 };
        let flags = flags(&Geometry::qwen3_6_35b_a3b(), KvFormat::Q8, &chip);
        for flag in [
            "-arch=sm_90a",
            "-DMULTIPROCESSORS=132",
            "-DHIDDEN=2048",
            "-DRMS_EPS=1e-6f",
            "-DATTN_LAYERS=10",
            "-DKV_BITS=8",
        ] {
            assert!(flags.iter().any(|known| known == flag), "{flag} in {flags:?}");
        }
    }
}
