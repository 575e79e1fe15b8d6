//! Every detector finds the fault that it is for, in a kernel that has it, and not in one without.

use lily_metal::device::{Argument, Device};
use lily_metal::emulator::FaultKind;

use crate::support::{accepts, all_of, dispatch, emulator, fault, finds, source, written};

/// A kernel over `a` (64 written words) and `b` (64 that nobody wrote). The body is its second line.
fn kernel(body: &str) -> String {
    format!(
        "kernel void k(device uint* a [[buffer(0)]], device uint* b [[buffer(1)]], uint i [[thread_index_in_threadgroup]], \
         uint lane [[thread_index_in_simdgroup]], uint g [[threadgroup_position_in_grid]]) {{\n{body}\n}}"
    )
}

#[test]
fn a_race_in_threadgroup_memory_is_found_and_a_barrier_ends_it() {
    let body =
        |barrier: &str| kernel(&format!("threadgroup uint s[64];\ns[i] = i;\n{barrier}\nb[i] = s[63 - i];"));
    finds(&body(""), 1, 64, FaultKind::Unwritten, &[5]);
    let body = |barrier: &str| {
        kernel(&format!(
            "threadgroup uint s[64]; s[i] = i; threadgroup_barrier(mem_flags::mem_threadgroup);\ns[i] += 1;\n{barrier}\n\
             b[i] = s[63 - i];"
        ))
    };
    finds(&body(""), 1, 64, FaultKind::Race, &[3, 5]);
    accepts(&body("threadgroup_barrier(mem_flags::mem_threadgroup);"), 1, 64);
    // A barrier that orders the other memory does not, nor does one of a SIMD-group, between two of them.
    finds(&body("threadgroup_barrier(mem_flags::mem_device);"), 1, 64, FaultKind::Race, &[3, 5]);
    finds(&body("simdgroup_barrier(mem_flags::mem_threadgroup);"), 1, 64, FaultKind::Race, &[3, 5]);
}

#[test]
fn a_barrier_of_a_simdgroup_orders_its_own_lanes() {
    let body = |barrier: &str| {
        kernel(&format!(
            "threadgroup uint s[32]; s[i] = i; simdgroup_barrier(mem_flags::mem_threadgroup);\ns[i] += 1;\n{barrier}\nb[i] = s[31 - i];"
        ))
    };
    accepts(&body("simdgroup_barrier(mem_flags::mem_threadgroup);"), 1, 32);
    // A collective moves values, and orders no memory.
    finds(&body("(void)simd_sum(1u);"), 1, 32, FaultKind::Race, &[3, 5]);
}

#[test]
fn a_write_after_reads_by_others_is_a_race() {
    // Thread 0 writes what all others of both SIMD-groups have read, itself last or first.
    let body = kernel(
        "threadgroup uint s[1]; if (i == 0) s[0] = 1; threadgroup_barrier(mem_flags::mem_threadgroup);\nb[i] = s[0];\nif (i == 0) s[0] = 2;",
    );
    finds(&body, 1, 64, FaultKind::Race, &[3, 4]);
}

#[test]
fn a_race_in_device_memory_is_found_within_a_threadgroup_and_between_two() {
    finds(&kernel("a[i] = i;\nb[i] = a[i ^ 1];"), 1, 2, FaultKind::Race, &[2, 3]);
    // Not even a barrier orders threadgroups.
    finds(
        &kernel("a[g] = g; threadgroup_barrier(mem_flags::mem_device);\nb[g] = a[1 - g];"),
        2,
        1,
        FaultKind::Race,
        &[2, 3],
    );
    let fine = "b[i] = i; threadgroup_barrier(mem_flags::mem_device);\nif (i == 0) a[0] = b[1];";
    accepts(&kernel(fine), 1, 2);
}

#[test]
fn bytes_beside_each_other_are_no_race_and_overlapping_ones_are() {
    let bytes = |at: &str| kernel(&format!("device uchar* c = (device uchar*)a;\nc[{at}] = uchar(i);"));
    accepts(&bytes("i"), 1, 64);
    finds(&bytes("i / 2"), 1, 64, FaultKind::Race, &[3]);
    // A word over the byte of another thread.
    finds(
        &kernel("device uchar* c = (device uchar*)a;\nif (i == 0) a[0] = 1; else c[3] = 1;"),
        1,
        2,
        FaultKind::Race,
        &[3],
    );
}

#[test]
fn atomics_do_not_race_with_each_other_but_with_what_is_not_atomic() {
    let add = "atomic_fetch_add_explicit((device atomic_uint*)a, 1u, memory_order_relaxed);";
    accepts(&kernel(add), 2, 64);
    finds(&kernel(&format!("{add}\nif (i == 1) a[0] = 7;")), 1, 64, FaultKind::Race, &[2, 3]);
}

#[test]
fn an_access_out_of_bounds_is_found_in_every_memory() {
    finds(&kernel("b[i + 33] = 1;"), 1, 32, FaultKind::OutOfBounds, &[2]);
    finds(&kernel("b[i] = a[int(i) - 1];"), 1, 1, FaultKind::OutOfBounds, &[2]);
    finds(&kernel("b[i] = ((device uint4*)a)[16].x;"), 1, 1, FaultKind::OutOfBounds, &[2]);
    let threadgroup =
        "threadgroup uint s[8], t[8]; if (i == 0) t[0] = 0;\nthreadgroup uint* p = s;\np[i] = 1;";
    finds(&kernel(threadgroup), 1, 9, FaultKind::OutOfBounds, &[4]);
    // Where the compiler knows the array's length, it is asked before the address is made: of a thread's own memory too.
    finds(&kernel("threadgroup uint s[8];\ns[i] = 1;"), 1, 9, FaultKind::ArrayIndex, &[3]);
    finds(
        &kernel("uint own[4] = {a[0], 1, 2, 3};\nown[i & 3] += 1;\nb[i] = own[i];"),
        1,
        5,
        FaultKind::ArrayIndex,
        &[4],
    );
}

#[test]
fn a_read_of_bytes_that_nobody_wrote_is_found() {
    finds(&kernel("a[i] = b[i];"), 1, 1, FaultKind::Unwritten, &[2]);
    finds(&kernel("threadgroup uint s[8];\na[i] = s[i];"), 1, 1, FaultKind::Unwritten, &[3]);
    // Half of it was written.
    finds(&kernel("((device ushort*)b)[i] = 1;\na[i] = b[i];"), 1, 1, FaultKind::Unwritten, &[3]);
    // What one threadgroup leaves in its memory is nothing to the next.
    finds(
        &kernel("threadgroup uint s[1];\nif (g == 5) s[0] = 0;\na[g] = s[0];"),
        8,
        1,
        FaultKind::Unwritten,
        &[4],
    );
}

#[test]
fn a_barrier_that_some_threads_do_not_reach_is_found() {
    let barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);";
    finds(&kernel(&format!("if (i < 7)\n{barrier}")), 1, 64, FaultKind::DivergentBarrier, &[3]);
    finds(&kernel(&format!("if (i == 9) return;\n{barrier}")), 1, 64, FaultKind::DivergentBarrier, &[3]);
    finds(
        &kernel(&format!("if (i < 7) {{\n{barrier}\n}} else {{\n{barrier}\n}}")),
        1,
        64,
        FaultKind::DivergentBarrier,
        &[3, 5],
    );
    finds(
        &kernel("if (lane < 7)\nsimdgroup_barrier(mem_flags::mem_none);"),
        1,
        32,
        FaultKind::DivergentBarrier,
        &[3],
    );
    // SIMD-groups go their own ways.
    accepts(&kernel("if (i < 32) simdgroup_barrier(mem_flags::mem_none);"), 1, 64);
}

#[test]
fn lanes_that_meet_at_different_functions_are_found() {
    finds(
        &kernel("b[i] = lane < 7 ?\nsimd_sum(i) :\nsimd_max(i);"),
        1,
        32,
        FaultKind::DivergentCollective,
        &[3, 4],
    );
    finds(
        &kernel("if (lane > 6) return;\nb[i] = simd_shuffle_down(i, 1);"),
        1,
        32,
        FaultKind::InactiveLane,
        &[3],
    );
    accepts(&kernel("if (lane > 6) return;\nb[i] = simd_sum(i);"), 1, 32);
}

#[test]
fn lanes_that_do_not_come_to_a_matrix_together_are_found() {
    let with = |body: &str| kernel(&format!("simdgroup_float8x8 m = simdgroup_float8x8(1.0f);{body}"));
    let product = "simdgroup_multiply_accumulate(m, m, m, m);";
    finds(&with(&format!("\nif (lane > 6) return;\n{product}")), 1, 32, FaultKind::InactiveLane, &[4]);
    // Others wait somewhere else, or at another product.
    let elsewhere = |with_it: &str| with(&format!("\nif ({with_it})\n{product}\nb[i] = simd_sum(i);"));
    finds(&elsewhere("lane == 7"), 1, 32, FaultKind::DivergentCollective, &[4, 5]);
    finds(&elsewhere("lane != 7"), 1, 32, FaultKind::DivergentCollective, &[4, 5]);
    let other =
        with(&format!("\nif (lane == 7) {{\n{product}\n}} else {{\n{product}\n}}\nb[i] = simd_sum(i);"));
    finds(&other, 1, 32, FaultKind::DivergentCollective, &[4, 6]);
    // A SIMD-group that is not whole has no matrices.
    finds(&with(&format!("\n{product}")), 1, 31, FaultKind::InactiveLane, &[2, 3]);
    accepts(&with(&format!("\nif (i < 32) {{ {product} }}")), 1, 64);
}

#[test]
fn a_dispatch_that_declares_less_than_its_kernel_touches_is_found() {
    let body = kernel("b[i] = a[i];");
    for (a_end, b_end, writes, what) in
        [(64, 128, true, "reads"), (128, 64, true, "writes"), (128, 128, false, "writes")]
    {
        let gpu = emulator(1);
        let (a, b) = (written(&gpu, "a", &[0; 256]), gpu.allocate("b", 256).unwrap());
        let mut dispatch = dispatch(&gpu, &body, 1, 32, &[&a, &b]);
        dispatch.touches = vec![all_of(&a, true, false), all_of(&b, !writes, writes)];
        dispatch.touches[0].range = 0..a_end;
        dispatch.touches[1].range = 0..b_end;
        let fault = fault(&gpu, dispatch);
        assert_eq!(fault.kind, FaultKind::Undeclared, "{fault}");
        assert!(fault.what.contains(what), "{fault}");
    }
}

#[test]
fn what_is_passed_by_value_is_not_written_and_not_read_beyond_its_end() {
    let gpu = emulator(1);
    let b = gpu.allocate("b", 256).unwrap();
    let with = |body: &str, bytes: usize| {
        let text = format!("struct Args {{ uint n, m; }}; kernel void k({body}");
        let mut dispatch = dispatch(&gpu, &text, 1, 1, &[&b, &b]);
        dispatch.arguments[0] = Argument::Bytes(vec![7; bytes]);
        dispatch
    };
    let read = "constant Args& x [[buffer(0)]], device uint* b [[buffer(1)]]) { b[0] = x.m; }";
    assert_eq!(fault(&gpu, with(read, 4)).kind, FaultKind::OutOfBounds);
    let write = "device uint* x [[buffer(0)]]) { x[0] = 1; }";
    assert_eq!(fault(&gpu, with(write, 8)).kind, FaultKind::ReadOnly);
}

#[test]
fn an_address_that_does_not_suit_its_type_is_found() {
    finds(
        &kernel("uint4 v = *(device uint4*)(a + 1);\nb[i] = v.x + v.y + v.z + v.w;"),
        1,
        1,
        FaultKind::Misaligned,
        &[2],
    );
    accepts(&kernel("b[i] = uint4(*(device packed_uint4*)(a + 1)).x;"), 1, 1);
}

#[test]
fn arithmetic_without_a_result_is_found() {
    finds(&kernel("b[i] = 7 / a[i];"), 1, 1, FaultKind::Undefined, &[2]);
    finds(&kernel("b[i] = 7 << (a[i] + 32);"), 1, 1, FaultKind::Undefined, &[2]);
}

#[test]
fn more_threadgroup_memory_than_there_is_is_refused() {
    let gpu = emulator(1);
    let a = written(&gpu, "a", &[0; 256]);
    let big = dispatch(&gpu, &kernel("threadgroup uint s[8193];\ns[i] = a[i];"), 1, 1, &[&a, &a]);
    let error = crate::support::submit(&gpu, &[big]).unwrap_err();
    assert!(error.to_string().contains("32772 bytes of threadgroup memory"), "{error}");
}

#[test]
fn what_is_no_metal_is_not_compiled() {
    let gpu = emulator(1);
    for (body, why) in [
        ("kernel void k(device uint* a) {}", "k.metal:1: a parameter of kernel k has no attribute"),
        ("void f(uint thread) {}", "k.metal:1: `thread` is a keyword"),
        (
            "\nvoid f() { threadgroup uint a[4]; }",
            "k.metal:2: a threadgroup variable is declared outside of a kernel",
        ),
        ("kernel void k(uint a [[sample_id]]) {}", "does not know the attribute [[sample_id]]"),
        ("kernel void k() { undeclared = 1; }", "k.metal:1"),
    ] {
        let error = gpu.compile(&source(body)).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}
