//! The shim's functions against the same in Rust.

use half::{bf16, f16};
use lily_metal::device::{Buffer, Device, Pipeline};

use crate::support::{bytes_of, dispatch, emulator, emulators, floats, run, source, words, written};

/// 32 lanes write a row of `rows` words each: `out[row * 32 + lane]`.
fn lanes(body: &str, rows: usize) -> Vec<Vec<u32>> {
    let text = format!(
        "kernel void k(device uint* out [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {{\n{body}\n}}"
    );
    let mut results: Vec<Vec<u32>> = emulators()
        .map(|gpu| {
            let out = gpu.allocate("out", rows * 128).unwrap();
            run(&gpu, dispatch(&gpu, &text, 1, 32, &[&out]));
            words(&out)
        })
        .collect();
    results.dedup();
    assert_eq!(results.len(), 1, "results depend on the seed, or on being tracked");
    results[0].chunks(32).map(<[u32]>::to_vec).collect()
}

#[test]
fn collectives_give_what_metal_says() {
    let got = lanes(
        "uint x = lane * 7 % 32;\n\
         out[lane] = simd_sum(x); out[32 + lane] = simd_max(x); out[64 + lane] = simd_min(x + 3);\n\
         out[96 + lane] = simd_prefix_inclusive_sum(x); out[128 + lane] = simd_prefix_exclusive_sum(x);\n\
         out[160 + lane] = simd_shuffle(x, ushort(31 - lane)); out[192 + lane] = simd_shuffle_xor(x, 5);\n\
         out[224 + lane] = simd_shuffle_up(x, 3); out[256 + lane] = simd_shuffle_down(x, 3);\n\
         out[288 + lane] = simd_broadcast(x, 9); out[320 + lane] = simd_broadcast_first(x);\n\
         out[352 + lane] = uint(ulong(simd_ballot(x % 3 == 0))); out[384 + lane] = simd_any(x == 4) + 2 * simd_all(x < 31);\n\
         out[416 + lane] = simd_or(1u << x); out[448 + lane] = quad_broadcast(x, 2); out[480 + lane] = quad_sum(x);",
        16,
    );
    let x: Vec<u32> = (0..32).map(|i| i * 7 % 32).collect();
    let each = |f: &dyn Fn(usize) -> u32| (0..32).map(f).collect::<Vec<u32>>();
    let expected: Vec<Vec<u32>> = vec![
        vec![496; 32],
        vec![31; 32],
        vec![3; 32],
        each(&|i| x[..=i].iter().sum()),
        each(&|i| x[..i].iter().sum()),
        each(&|i| x[31 - i]),
        each(&|i| x[i ^ 5]),
        each(&|i| if i < 3 { x[i] } else { x[i - 3] }),
        each(&|i| if i < 29 { x[i + 3] } else { x[i] }),
        vec![x[9]; 32],
        vec![x[0]; 32],
        vec![(0..32).map(|i| u32::from(x[i].is_multiple_of(3)) << i).sum(); 32],
        vec![1; 32],
        vec![u32::MAX; 32],
        each(&|i| x[i / 4 * 4 + 2]),
        each(&|i| x[i / 4 * 4..i / 4 * 4 + 4].iter().sum()),
    ];
    assert_eq!(got, expected);
}

#[test]
fn places_of_threads_are_those_of_the_grid() {
    let body = "kernel void k(device uint* out [[buffer(0)]], uint3 at [[thread_position_in_grid]], uint3 g [[threadgroup_position_in_grid]],\n\
                ushort3 in_group [[thread_position_in_threadgroup]], uint3 groups [[threadgroups_per_grid]],\n\
                uint threads [[threads_per_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]], uint simds [[simdgroups_per_threadgroup]],\n\
                uint index [[thread_index_in_threadgroup]]) {\n\
                uint linear = ((g.z * groups.y + g.y) * groups.x + g.x) * threads + in_group.x;\n\
                out[linear] = at.x + 1000 * at.y + 100000 * at.z + 1000000 * simd + 10000000 * simds + (index != in_group.x); }";
    for gpu in emulators() {
        let out = gpu.allocate("out", 2 * 3 * 2 * 40 * 4).unwrap();
        let mut dispatch = dispatch(&gpu, body, 1, 40, &[&out]);
        dispatch.grid = [2, 3, 2];
        run(&gpu, dispatch);
        for (i, &word) in words(&out).iter().enumerate() {
            let (x, y, z) = (i % 80, i / 80 % 3, i / 240);
            assert_eq!(word as usize, x + 1000 * y + 100_000 * z + 1_000_000 * (x % 40 / 32) + 20_000_000);
        }
    }
}

#[test]
fn small_floats_round_to_nearest_even() {
    // Halfway cases, numbers below the normal ones, and beyond the largest, each followed by what lies next to it.
    let mut inputs: Vec<f32> =
        vec![0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, 65504.0, 65520.0, 65519.99, 1e-8, 3e38, 1e-40];
    for bits in (0..0x7c00u16).step_by(37) {
        let (a, b) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
        inputs.extend([a, (a + b) / 2.0, -(a + b) / 2.0]);
    }
    for bits in (0..0x7f80u16).step_by(37) {
        let (a, b) = (bf16::from_bits(bits).to_f32(), bf16::from_bits(bits + 1).to_f32());
        inputs.extend([a, a + (b - a) / 2.0, -b]);
    }
    let near: Vec<f32> = inputs.iter().flat_map(|x| [*x, f32::from_bits(x.to_bits() ^ 1)]).collect();
    let body = "kernel void k(device const float* x [[buffer(0)]], device half* h [[buffer(1)]], device bfloat* b [[buffer(2)]],\n\
                uint i [[thread_position_in_grid]]) { h[i] = half(x[i]); b[i] = bfloat(x[i]); }";
    let gpu = emulator(1);
    let x = written(&gpu, "x", &bytes_of(&near, f32::to_le_bytes));
    let (h, b) = (gpu.allocate("h", near.len() * 2).unwrap(), gpu.allocate("b", near.len() * 2).unwrap());
    run(&gpu, dispatch(&gpu, body, near.len() as u32, 1, &[&x, &h, &b]));
    let shorts = |memory: &lily_metal::emulator::Memory| {
        let mut bytes = vec![0; memory.bytes()];
        memory.read(0, &mut bytes);
        bytes.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect::<Vec<_>>()
    };
    for ((x, h), b) in near.iter().zip(shorts(&h)).zip(shorts(&b)) {
        if !x.is_nan() {
            assert_eq!(h, f16::from_f32(*x).to_bits(), "{x:e}");
            assert_eq!(b, bf16::from_f32(*x).to_bits(), "{x:e}");
        }
    }
}

#[test]
fn arithmetic_of_halves_is_rounded_after_every_operation() {
    let body = "kernel void k(device float* out [[buffer(0)]]) {\n\
                half a = 2048.0h, b = 1.0h; out[0] = a + b + b; out[1] = a + 2.0f; out[2] = half4(a, b, b, b).x + 1;\n\
                bfloat c = bfloat(256.0f); out[3] = c + bfloat(1.0f); out[4] = float(half2(1.0h / 3.0h).y); out[5] = a; a += b; out[6] = a; }";
    let gpu = emulator(1);
    let out = gpu.allocate("out", 28).unwrap();
    run(&gpu, dispatch(&gpu, body, 1, 1, &[&out]));
    assert_eq!(
        floats(&out),
        [2048.0, 2050.0, 2048.0, 256.0, f16::from_f32(1.0 / 3.0).to_f32(), 2048.0, 2048.0]
    );
}

#[test]
fn vectors_swizzle_convert_and_compare() {
    let body = "kernel void k(device float* out [[buffer(0)]]) {\n\
                float4 v = float4(1, 2, 3, 4); v.xz = v.wy; float2 s = v.zw + v.xy * 2; v.yw += 10; out[0] = s.x; out[1] = s.y;\n\
                out[2] = v.x; out[3] = v.y; out[4] = v.z; out[5] = v.w; float3 w = float3(s, 5); out[6] = w.zyx[0] + dot(w, float3(1));\n\
                out[7] = any(v > float4(11)) + 2 * all(v >= float4(2)); out[8] = select(float2(1), float2(2), bool2(false, true)).y;\n\
                uint4 u = uint4(v); u = u << 1 | 1u; out[9] = u.w; out[10] = as_type<float>(as_type<uint>(1.5f) + (1u << 23));\n\
                packed_float3 p = packed_float3(w); out[11] = p[2]; out[12] = clamp(float4(3), 0.0f, 2.0f).z; out[13] = fma(2.0f, 3.0f, 4.0f);\n\
                out[14] = float(popcount(u.x)) + float(clz(1u)); out[15] = precise::exp(0.0f) + fast::max(1.0f, 2.0f); }";
    let gpu = emulator(1);
    let out = gpu.allocate("out", 64).unwrap();
    run(&gpu, dispatch(&gpu, body, 1, 1, &[&out]));
    // v is (4, 2, 2, 4), then (4, 12, 2, 14); s is (2, 4) + (8, 4).
    let expected =
        [10.0, 8.0, 4.0, 12.0, 2.0, 14.0, 5.0 + 23.0, 3.0, 2.0, 29.0, 3.0, 5.0, 2.0, 10.0, 2.0 + 31.0, 3.0];
    assert_eq!(floats(&out), expected);
}

#[test]
fn matrices_multiply_load_and_store_also_transposed() {
    let body = "template <typename T> void product(device const T* a, device const T* b, device float* out) {\n\
                simdgroup_matrix<T, 8, 8> x, y; simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f), d;\n\
                simdgroup_load(x, a, 9, ulong2(1, 2)); simdgroup_load(y, b, 8, ulong2(0, 0), true);\n\
                simdgroup_multiply_accumulate(d, x, y, c); simdgroup_store(d, out, 8); simdgroup_store(d, out + 64, 8, ulong2(0, 0), true);\n\
                simdgroup_multiply(d, x, simdgroup_matrix<T, 8, 8>(T(2.0f))); simdgroup_store(d, out + 128, 8); }\n\
                kernel void k(device const float* a [[buffer(0)]], device const half* h [[buffer(1)]], device const bfloat* b [[buffer(2)]],\n\
                device float* out [[buffer(3)]]) { product<float>(a, a, out); product<half>(h, h, out + 192); product<bfloat>(b, b, out + 384); }";
    let values: Vec<f32> = (0..100).map(|i| ((i * 37 % 19) as f32 - 9.0) / 4.0).collect();
    for gpu in emulators() {
        let a = written(&gpu, "a", &bytes_of(&values, f32::to_le_bytes));
        let h = written(&gpu, "h", &bytes_of(&values, |v| f16::from_f32(v).to_le_bytes()));
        let b = written(&gpu, "b", &bytes_of(&values, |v| bf16::from_f32(v).to_le_bytes()));
        let out = gpu.allocate("out", 3 * 192 * 4).unwrap();
        run(&gpu, dispatch(&gpu, body, 1, 32, &[&a, &h, &b, &out]));
        let left = |row: usize, column: usize| values[(row + 2) * 9 + column + 1];
        for results in floats(&out).chunks(192) {
            for (row, column) in (0..64).map(|i| (i / 8, i % 8)) {
                let sum: f32 = 1.0 + (0..8).map(|k| left(row, k) * values[column * 8 + k]).sum::<f32>();
                assert_eq!(results[row * 8 + column], sum);
                assert_eq!(results[64 + column * 8 + row], sum);
                assert_eq!(results[128 + row * 8 + column], 2.0 * left(row, column));
            }
        }
    }
}

#[test]
fn elements_of_a_matrix_are_those_of_its_lanes_before_and_after_every_step() {
    // A lane writes its elements, the SIMD-group multiplies what all have written, each lane reads its own of what comes of that, and so on, with more
    // steps than lanes are ever ahead of each other, and with no other place to meet.
    let body = "kernel void k(device const float* in [[buffer(0)]], device float* out [[buffer(1)]], uint lane [[thread_index_in_simdgroup]]) {\n\
                simdgroup_float8x8 x, unit(1.0f), twice(2.0f); simdgroup_half8x8 small;\n\
                const uint at = ((lane / 4 & 4) + lane / 2 % 4) * 8 + (lane / 4 & 2) * 2 + lane % 2 * 2;\n\
                x.thread_elements()[0] = in[at]; x.thread_elements()[1] = in[at + 1];\n\
                for (uint i = 0; i < 3; ++i) { simdgroup_multiply(x, x, twice);\n\
                  x.thread_elements()[0] += 1.0f; simdgroup_store(x, out + 64 * i, 8);\n\
                  x.thread_elements()[1] -= 1.0f; simdgroup_float8x8 y = x; x = y; }\n\
                for (uint i = 0; i < 1500; ++i) simdgroup_multiply(x, unit, x);\n\
                simdgroup_multiply(small, x, unit); const float2 own = float2(small.thread_elements()[0], small.thread_elements()[1]);\n\
                out[192 + at] = own.x; out[192 + at + 1] = own.y; }";
    let mut values: Vec<f32> = (0..64).map(|i| (i * 37 % 19) as f32 - 9.0).collect();
    for gpu in emulators() {
        let input = written(&gpu, "in", &bytes_of(&values, f32::to_le_bytes));
        let out = gpu.allocate("out", 4 * 256).unwrap();
        run(&gpu, dispatch(&gpu, body, 1, 32, &[&input, &out]));
        let mut expected = Vec::new();
        let mut x = values.clone();
        for _ in 0..3 {
            x.iter_mut().enumerate().for_each(|(i, x)| *x = 2.0 * *x + if i % 2 == 0 { 1.0 } else { 0.0 });
            expected.extend(&x);
            x.iter_mut().skip(1).step_by(2).for_each(|x| *x -= 1.0);
        }
        expected.extend(x);
        assert_eq!(floats(&out), expected, "{:?}", gpu.options());
        values.rotate_left(1);
    }
}

#[test]
fn atomics_of_all_kinds_add_up() {
    let body = "kernel void k(device atomic_uint* u [[buffer(0)]], device atomic_float* f [[buffer(1)]], device atomic_int* s [[buffer(2)]],\n\
                uint i [[thread_position_in_grid]]) {\n\
                atomic_fetch_max_explicit(u, i, memory_order_relaxed); atomic_fetch_min_explicit(u + 1, i, memory_order_relaxed);\n\
                atomic_fetch_or_explicit(u + 2, 1u << i % 32, memory_order_relaxed); atomic_fetch_add_explicit(f, 0.5f, memory_order_relaxed);\n\
                int seen = atomic_load_explicit(s, memory_order_relaxed);\n\
                while (!atomic_compare_exchange_weak_explicit(s, &seen, seen - 1, memory_order_relaxed, memory_order_relaxed)) {}\n\
                atomic_store_explicit(u + 3, 5u, memory_order_relaxed); }";
    for gpu in emulators() {
        let u = written(&gpu, "u", &bytes_of(&[0, 99, 0, 0], u32::to_le_bytes));
        let (f, s) = (written(&gpu, "f", &[0; 4]), written(&gpu, "s", &[0; 4]));
        run(&gpu, dispatch(&gpu, body, 2, 64, &[&u, &f, &s]));
        assert_eq!(words(&u), [127, 0, u32::MAX, 5]);
        assert_eq!(floats(&f), [64.0]);
        assert_eq!(words(&s), [-128i32 as u32]);
    }
}

#[test]
fn templates_macros_and_threadgroup_arguments_work() {
    let text = "template <int N> kernel void fill(device float* out [[buffer(0)]], threadgroup float* shared [[threadgroup(0)]],\n\
                uint i [[thread_index_in_threadgroup]]) {\n\
                threadgroup float own[WIDTH][N];\n\
                shared[i] = 1.5; own[i][N - 1] = 2; threadgroup_barrier(mem_flags::mem_threadgroup);\n\
                out[i] = shared[WIDTH - 1 - i] + own[WIDTH - 1 - i][N - 1] + N; }\n\
                template [[host_name(\"k\")]] kernel void fill<4>(device float*, threadgroup float*, uint);\n\
                template [[host_name(\"k_8\")]] kernel void fill<8>(device float*, threadgroup float*, uint);";
    let gpu = emulator(1);
    let library = gpu.compile(&source(text)).unwrap();
    assert_eq!(library.kernels(), ["k", "k_8"]);
    let out = gpu.allocate("out", 128).unwrap();
    let mut eight = dispatch(&gpu, text, 1, 32, &[&out]);
    eight.pipeline = gpu.pipeline(&library, "k_8").unwrap();
    eight.threadgroup_memory = vec![128];
    assert_eq!(eight.pipeline.threadgroup_memory(), 32 * 8 * 4);
    run(&gpu, eight);
    assert_eq!(floats(&out), [11.5; 32]);
    let error = gpu.pipeline(&library, "fill").unwrap_err().to_string();
    assert_eq!(error, "there is no kernel fill: k.metal has k, k_8");
}
