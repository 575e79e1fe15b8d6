//! Which matrix unit a prompt's products go through: `simdgroup_matrix`, which every Apple GPU from the M1 on has, or Metal 4's `matmul2d`,
//! which the M5 and later run on their neural accelerators.
//!
//! Both are in `kernels/gemm.h` and give the same bits, so this is a matter of speed alone: [`are_faster`]. But compilers and systems have
//! been reported to multiply wrongly with tensors and say nothing (ml-explore/mlx, issues 3585 and 3586). What is exact can be
//! compared to the bit, so [`agree`] has both units multiply on the machine itself, before anything is made with tensors. Where it says no everything is
//! as without. Where it says yes a product's kernel is compiled from [`Source::with_tensors`] and made ready with [`Device::tensor_pipeline`]
//! beside the one without, and each pass takes either by its rows ([`Products`]).
//!
//! On earlier GPUs Metal 4 has `matmul2d` too, and runs it on the same units as `simdgroup_matrix`: llama.cpp takes it from the M5 on
//! alone (ggml-org/llama.cpp, pull request 16634). That it takes about 400 rows on an M5 to be the faster one is by public reports; Lily
//! has not measured it.

use std::time::Duration;

use lily_gpu::prefill::metal;
use lily_gpu::stage::Stage;
use lily_model::geometry::Geometry;

use crate::device::{Argument, Buffer, Completion, Device, DeviceInfo, Dispatch, Pass, Source, Touch};
use crate::error::DeviceError;

/// The first family with neural accelerators: M5.
const FAMILY: u32 = 10;
/// Rows of a block that `kernels/gemm.h` multiplies so.
pub const BLOCK_ROWS: usize = 64;
/// Rows from which on it is faster.
pub const FEWEST_ROWS: usize = 400;

/// Threads of a product's threadgroup, and columns of its tile (`kernels/gemm.h`).
const THREADS: u32 = 128;
const COLUMNS: usize = 64;
/// Inputs of a row in `kernels/products_check.metal`, and those of a group.
const INPUTS: usize = 256;
const GROUP: usize = 64;
/// The largest that inputs are rounded to is 2,048: this much of 1,024.
const LARGEST: f32 = 1.9999;
/// How long the products may take, a compiler's work for them included.
const PATIENCE: Duration = Duration::from_secs(10);
/// 1.0 as bf16: a result is then the sum itself.
const ONE: u16 = 0x3f80;

/// Whether a product goes through `matmul2d` in which a matrix meets `rows` rows (of an expert: on average) in blocks of `block_rows`.
pub fn are_faster(info: &DeviceInfo, block_rows: usize, rows: usize) -> bool {
    info.has_metal4 && info.family >= FAMILY && block_rows == BLOCK_ROWS && rows >= FEWEST_ROWS
}

/// Which products of a pass go through `matmul2d`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Products {
    /// Those of all rows.
    pub dense: bool,
    /// Those of experts.
    pub experts: bool,
}

impl Products {
    /// Those of a pass of `rows` tokens with a plan for `plan_rows`.
    pub fn of_prompt(info: &DeviceInfo, geometry: &Geometry, plan_rows: usize, rows: usize) -> Products {
        let (dense_block, experts_block) = metal::block_rows(geometry, plan_rows);
        let (dense, experts) = metal::matrix_rows(geometry, rows);
        Products {
            dense: are_faster(info, dense_block, dense),
            experts: are_faster(info, experts_block, experts),
        }
    }

    /// Whether those of `stage` are among them.
    pub fn include(self, stage: Stage) -> bool {
        if matches!(stage, Stage::MoeUp | Stage::MoeDown) { self.experts } else { self.dense }
    }
}

/// Whether `device` multiplies with tensors, and to the bit what it does without them, for weights of 4 and of 8 bits: over the largest numbers, with
/// one sign in some rows and columns and changing signs in others, and over numbers of all sizes. `source` is
/// [`sources::products_check`](crate::sources::products_check).
///
/// # Errors
/// Where it does not multiply without tensors either, or has no memory. A device that refuses, or fails at, the kernels with tensors has none.
pub fn agree<D: Device>(device: &D, source: &Source) -> Result<bool, DeviceError> {
    if !device.info().has_metal4 {
        return Ok(false);
    }
    let plain = device.compile(source)?;
    let Ok(tensors) = device.compile(&source.clone().with_tensors()) else { return Ok(false) };
    for bits in [4, 8] {
        let name = format!("products_check_{bits}");
        let expected = multiply(device, bits, device.pipeline(&plain, &name)?)?;
        let found = device
            .tensor_pipeline(&tensors, &name, THREADS)
            .and_then(|pipeline| multiply(device, bits, pipeline));
        match found {
            Ok(found) if found == expected => {}
            Err(error @ DeviceError::OutOfMemory { .. }) => return Err(error),
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// The bytes of the results of `pipeline`.
fn multiply<D: Device>(device: &D, bits: usize, pipeline: D::Pipeline) -> Result<Vec<u8>, DeviceError> {
    // Numbers that are the same every time, and look like none.
    let mixed = |at: usize| (at as u32).wrapping_mul(0x9e37_79b9) ^ (at as u32) >> 3;
    let input = |at: usize| {
        let (row, k) = (at / INPUTS, at % INPUTS);
        match row % 4 {
            0 => LARGEST,
            1 => -LARGEST,
            2 if k % 2 == 0 => -LARGEST,
            2 => LARGEST,
            _ => mixed(at) as i32 as f32,
        }
    };
    let words = COLUMNS * INPUTS * bits / 32;
    let word = |at: usize| match at / (words / COLUMNS) % 3 {
        0 => u32::MAX,
        1 => 0,
        _ => mixed(at),
    };
    let ones = vec![ONE; COLUMNS * INPUTS / GROUP];
    let inputs = [
        ("words", (0..words).flat_map(|at| word(at).to_le_bytes()).collect::<Vec<u8>>()),
        ("scales", ones.iter().flat_map(|one| one.to_le_bytes()).collect()),
        ("biases", ones.iter().flat_map(|one| one.to_le_bytes()).collect()),
        ("x", (0..BLOCK_ROWS * INPUTS).flat_map(|at| input(at).to_le_bytes()).collect()),
    ];
    let (mut arguments, mut touches) = (Vec::new(), Vec::new());
    let mut bind = |buffer: &D::Buffer, writes: bool| {
        arguments.push(Argument::Buffer { buffer: buffer.clone(), offset: 0 });
        let range = 0..buffer.bytes();
        touches.push(Touch { buffer: buffer.clone(), range, reads: !writes, writes });
    };
    for (label, bytes) in &inputs {
        let buffer = device.allocate(label, bytes.len())?;
        buffer.write(0, bytes);
        bind(&buffer, false);
    }
    let mut results = vec![0; BLOCK_ROWS * COLUMNS * size_of::<f32>()];
    let out = device.allocate("out", results.len())?;
    bind(&out, true);
    let dispatch = Dispatch {
        label: "products_check".to_owned(),
        pipeline,
        arguments,
        threadgroup_memory: vec![],
        grid: [1, 1, 1],
        threads: THREADS,
        waits_for: vec![],
        touches,
    };
    let pass = Pass { label: "products_check", before: &[], dispatches: &[dispatch], after: &[] };
    device.submit(&pass)?.wait(PATIENCE)?;
    out.read(0, &mut results);
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(family: u32, has_metal4: bool) -> DeviceInfo {
        DeviceInfo {
            name: "a GPU".into(),
            family,
            has_metal4,
            cores: 40,
            memory: 1 << 37,
            working_set: 1 << 36,
            max_buffer: 1 << 36,
            has_unified_memory: true,
            threadgroup_memory: 32 << 10,
            simd_width: 32,
            page_bytes: 16 << 10,
        }
    }

    #[test]
    fn an_m5_takes_tensors_for_many_rows_and_no_other_gpu_for_any() {
        let m5 = info(10, true);
        assert!(are_faster(&m5, 64, 400) && are_faster(&m5, 64, 8192));
        assert!(!are_faster(&m5, 64, 399) && !are_faster(&m5, 32, 8192));
        // Metal 4 without accelerators, and an M5 whose system is older.
        assert!(!are_faster(&info(9, true), 64, 8192) && !are_faster(&info(10, false), 64, 8192));
    }

    #[test]
    fn experts_take_tensors_from_the_rows_on_that_each_has_on_average() {
        let (m5, model) = (info(10, true), Geometry::qwen3_6_35b_a3b());
        let of = |plan_rows, rows| Products::of_prompt(&m5, &model, plan_rows, rows);
        assert_eq!(of(512, 399), Products::default());
        // 64 rows for each of 256 experts, in blocks of 32.
        assert_eq!(of(2048, 2048), Products { dense: true, experts: false });
        assert_eq!(of(16_384, 16_384), Products { dense: true, experts: true });
        assert!(!of(2048, 2048).include(Stage::MoeDown) && of(2048, 2048).include(Stage::MoeRoute));
    }

    #[test]
    fn the_kernels_have_the_same_sizes() {
        let (gemm, check) =
            (include_str!("../kernels/gemm.h"), include_str!("../kernels/products_check.metal"));
        let has =
            |text: &str, name: &str, value: usize| text.contains(&format!("constexpr int {name} = {value};"));
        assert!(has(gemm, "TENSOR_ROWS", BLOCK_ROWS) && has(gemm, "COLUMNS", COLUMNS));
        assert!(has(gemm, "GEMM_THREADS", THREADS as usize));
        assert!(has(check, "CHECK_ROWS", BLOCK_ROWS) && has(check, "CHECK_INPUTS", INPUTS));
    }
}
