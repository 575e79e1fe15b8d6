//! Metal 4's tensors: what a device asks of who uses them, and what a kernel must not do with them.

use lily_metal::DeviceError;
use lily_metal::device::{Argument, Device, Dispatch, Source};
use lily_metal::emulator::{Emulator, FaultKind, Options};
use lily_metal::{sources, tensors};
use lily_model::geometry::Geometry;

use crate::support::{all_of, emulator, fault, floats, run, source, submit};

/// A product of two 16 x 16 matrices by one SIMD-group into `out`. `before` and `after` stand around it; `D` is its descriptor.
fn kernel(scope: u32, before: &str, after: &str) -> Source {
    let body = format!(
        "#include <metal_tensor>\n\
         #include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n\
         kernel void k(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {{\n\
         threadgroup half left[256], right[256];\n\
         for (uint i = t; i < 256; i += 32) {{ left[i] = half(i % 7); right[i] = half(i % 5); }}\n\
         {before}\n\
         typedef tensor<threadgroup half, dextents<int, 2>, tensor_inline> Operand;\n\
         typedef tensor<device float, dextents<int, 2>, tensor_inline> Result;\n\
         constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(16, 16, 16, false, true);\n\
         mpp::tensor_ops::matmul2d<descriptor, execution_simdgroups<{scope}>> operation;\n\
         Operand a(left, dextents<int, 2>(16, 16)), b(right, dextents<int, 2>(16, 16));\n\
         auto sums = operation.get_destination_cooperative_tensor<Operand, Operand, float>();\n\
         {after}\n\
         Result to(out, dextents<int, 2>(16, 16));\n\
         sums.store(to); }}"
    );
    source(&body).with_tensors()
}

const BARRIER: &str = "threadgroup_barrier(mem_flags::mem_threadgroup);";
const RUN: &str = "operation.run(a, b, sums);";

fn gpu(seed: u64, tracked: bool) -> Emulator {
    Emulator::with_tensors(Options { seed, tracked }).unwrap()
}

/// A dispatch of the kernel by `threads` threads, whose pipeline is made for `fixed`.
fn dispatch(gpu: &Emulator, source: &Source, fixed: u32, threads: u32) -> Dispatch<Emulator> {
    let library = gpu.compile(source).unwrap_or_else(|error| panic!("{error}"));
    let out = gpu.allocate("out", 1024).unwrap();
    Dispatch {
        label: "k".into(),
        pipeline: gpu.tensor_pipeline(&library, "k", fixed).unwrap(),
        arguments: vec![Argument::Buffer { buffer: out.clone(), offset: 0 }],
        threadgroup_memory: vec![],
        grid: [1, 1, 1],
        threads,
        waits_for: vec![],
        touches: vec![all_of(&out, false, true)],
    }
}

#[test]
fn a_product_is_rows_times_rows() {
    for tracked in [true, false] {
        let gpu = gpu(1, tracked);
        let dispatch = dispatch(&gpu, &kernel(1, BARRIER, RUN), 32, 32);
        let Argument::Buffer { buffer: out, .. } = dispatch.arguments[0].clone() else { unreachable!() };
        run(&gpu, dispatch);
        for (at, found) in floats(&out).into_iter().enumerate() {
            let (row, column) = (at / 16, at % 16);
            let expected: usize = (0..16).map(|k| (row * 16 + k) % 7 * ((column * 16 + k) % 5)).sum();
            assert_eq!(found, expected as f32, "row {row}, column {column}");
        }
    }
}

#[test]
fn what_a_kernel_does_wrong_with_tensors_is_found() {
    let element = "operation.run(a, b, sums); for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] += 1;";
    let smaller = "Operand c(left, dextents<int, 2>(8, 16)); operation.run(c, b, sums);";
    let cases = [
        (kernel(1, "", RUN), FaultKind::Race),
        (kernel(1, BARRIER, element), FaultKind::Misuse),
        (kernel(1, BARRIER, smaller), FaultKind::Misuse),
        (kernel(2, BARRIER, RUN), FaultKind::Misuse),
        (kernel(1, BARRIER, "if (t < 16) operation.run(a, b, sums);"), FaultKind::DivergentBarrier),
    ];
    for (source, kind) in cases {
        for seed in [1, 2, 3] {
            let gpu = gpu(seed, true);
            let fault = fault(&gpu, dispatch(&gpu, &source, 32, 32));
            assert_eq!(fault.kind, kind, "{fault}");
        }
    }
}

#[test]
fn what_matmul2d_does_not_take_is_not_compiled() {
    let gpu = gpu(1, true);
    let plain = kernel(1, BARRIER, RUN);
    let wrong = [
        ("matmul2d_descriptor(16, 16, 16", "matmul2d_descriptor(8, 8, 16", "a multiple of 16"),
        ("false, true);", "false, false);", "rows times rows"),
        ("threadgroup half", "threadgroup bfloat", "halves into f32"),
    ];
    for (from, to, why) in wrong {
        let source = Source { text: plain.text.replace(from, to), ..plain.clone() };
        let error = gpu.compile(&source).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_pipeline_with_tensors_is_made_for_its_threads_and_only_where_there_are_tensors() {
    let (gpu, source) = (gpu(1, false), kernel(1, BARRIER, RUN));
    assert!(matches!(emulator(1).compile(&source), Err(DeviceError::Compile { .. })));
    let library = gpu.compile(&source).unwrap();
    assert!(matches!(gpu.pipeline(&library, "k"), Err(DeviceError::Kernel { .. })));
    let without = gpu.compile(&crate::support::source("kernel void k() {}")).unwrap();
    assert!(matches!(gpu.tensor_pipeline(&without, "k", 32), Err(DeviceError::Kernel { .. })));
    let refused = submit(&gpu, &[dispatch(&gpu, &source, 64, 32)]).unwrap_err().to_string();
    assert!(refused.contains("32 threads a threadgroup and its pipeline was made for 64"), "{refused}");
}

#[test]
fn a_unit_that_multiplies_otherwise_is_not_used() {
    let check = sources::products_check(&Geometry::qwen3_6_35b_a3b());
    let gpu = gpu(1, false);
    assert!(tensors::agree(&gpu, &check).unwrap());
    assert!(!tensors::agree(&emulator(1), &check).unwrap(), "it has no tensors");
    // What a wrong compiler may make of it: fewer inputs, sums in half precision, an element of another place.
    let wrong = [
        (
            "matmul2d_descriptor(TENSOR_ROWS, COLUMNS, GROUP,",
            "matmul2d_descriptor(TENSOR_ROWS, COLUMNS, GROUP - 16,",
        ),
        ("totals[i], sums[i], staged", "totals[i], float(half(sums[i])), staged"),
        ("staged.row_factors[at[1]]", "staged.row_factors[at[1] ^ 1]"),
        ("operation.run(rows", "unknown.run(rows"),
    ];
    for (from, to) in wrong {
        assert!(check.text.contains(from), "{from}");
        let source = Source { text: check.text.replace(from, to), ..check.clone() };
        assert!(!tensors::agree(&gpu, &source).unwrap(), "{to}");
    }
}
