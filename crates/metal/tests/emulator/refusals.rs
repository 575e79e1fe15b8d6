//! What Metal's compiler would refuse is refused here, and what it takes is taken.

use lily_metal::device::{Device, Source};

use crate::support::{emulator, source};

/// Compiles what `k` calls, and says why not.
fn refusal(text: &str) -> Option<String> {
    emulator(1).compile(&source(text)).err().map(|e| e.to_string())
}

fn refuses(text: &str, why: &str) {
    let said = refusal(text).unwrap_or_else(|| panic!("this was taken: {text}"));
    assert!(said.contains(why) && said.contains("k.metal:"), "{text}: {said}");
}

const KERNEL: &str = "kernel void k(device float* d [[buffer(0)]], constant float& c [[buffer(1)]], device const float4* v [[buffer(2)]], \
                      threadgroup float* t [[threadgroup(0)]], uint i [[thread_position_in_grid]])";

/// A kernel with memory of every kind whose body is `body`, after `before`.
fn kernel(before: &str, body: &str) -> String {
    format!(
        "{before}\n{KERNEL} {{ float own[4] = {{0, 1, 2, 3}}; float one = own[0]; threadgroup float s[8];\n{body} }}"
    )
}

#[test]
fn a_pointer_without_an_address_space_is_refused() {
    let why = "has an address space";
    refuses("float f(float* p) { return *p; }", why);
    refuses("float f(float& p) { return p; }", why);
    refuses("struct S { const uint4* p; };", why);
    refuses("template <typename T> T f(const T* p) { return *p; }", why);
    refuses("float f(float (&p)[4]) { return p[0]; }", why);
    refuses("float f(device float** p) { return **p; }", why);
    refuses(&kernel("", "float* p = &one; d[i] = *p;"), why);
}

#[test]
fn address_spaces_do_not_mix() {
    let spaces = [
        ("device", "d"),
        ("constant", "&c"),
        ("threadgroup", "s"),
        ("threadgroup", "t"),
        ("thread", "own"),
        ("thread", "&one"),
    ];
    for (wanted, _) in [spaces[0], spaces[1], spaces[2], spaces[4]] {
        let function = format!("float f({wanted} const float* p) {{ return p[0]; }}");
        for (given, argument) in spaces {
            let text = kernel(&function, &format!("t[i] = f({argument});"));
            match wanted == given {
                true => assert_eq!(refusal(&text), None, "{text}"),
                false => refuses(&text, "volatile"),
            }
            // Nor does a cast bring one into another.
            let text = kernel(
                "",
                &format!("{wanted} const float* p = ({wanted} const float*)({argument}); t[i] = *p;"),
            );
            match wanted == given {
                true => assert_eq!(refusal(&text), None, "{text}"),
                false => refuses(&text, "qualifier"),
            }
        }
    }
    refuses(&kernel("float f(thread const float4& p) { return p.x; }", "t[i] = f(v[0]);"), "volatile");
    refuses(&kernel("struct S { threadgroup float* p; };", "S x; x.p = d; t[i] = x.p[0];"), "volatile");
}

#[test]
fn what_kernels_do_with_pointers_is_taken() {
    let body = "float4 a = v[i]; a += v[1] * 2; a.xy = v[2].zw; d[i] = dot(a, v[3]) + c; d[1] += own[i]; s[i] = fma(c, own[1], d[2]);\n\
                device const uint4* u = (device const uint4*)v; uint4 w = u[0]; w.x = min(w.y, u[1].x); t[0] = float(w.x);\n\
                simdgroup_float8x8 m; simdgroup_load(m, s, 8); simdgroup_store(m, d, 8); g(own); h(a); t[1] = simd_sum(own[2]);\n\
                device atomic_uint* n = (device atomic_uint*)d; atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);\n\
                threadgroup float* row = s + 4; row[0] = i > 2 ? v[0].x : 0; float4 b = i > 3 ? v[0] : float4(0); d[3] = b.x;";
    let before = "template <int N> void g(thread float (&x)[N]) { x[0] += 1; }\nvoid h(thread float4& x) { x *= 2; }\n\
                  struct Pair { float a, b; float sum() const { return a + b; } };\nconstant float TABLE[2] = {1, 2};\nconstant int N = 2;";
    assert_eq!(refusal(&kernel(before, body)), None);
}

#[test]
fn what_metal_leaves_out_of_cpp_is_refused() {
    for (text, why) in [
        ("void f() { threadgroup float s[4]; }", "outside of a kernel"),
        ("threadgroup float s[4];", "outside of a kernel"),
        (&kernel("", "threadgroup float z = 1;"), "k.metal:3"),
        ("uint f(uint n) { return n ? f(n - 1) : 0; }", "f calls itself"),
        (
            "uint g(uint n);\nuint f(uint n) { return g(n); }\nuint g(uint n) { return n ? f(n - 1) : 0; }",
            "calls itself",
        ),
        ("float f(float x) { return double(x); }", "no doubles"),
        ("void f() { try { } catch (...) { } }", "no exceptions"),
        ("void f() { throw 1; }", "no exceptions"),
        ("struct S { virtual void f(); };", "no virtual functions"),
        ("void f() { again: goto again; }", "no goto"),
        ("void f() { device int* p = new int; }", "no memory"),
        ("int f() { static int n = 0; return ++n; }", "no static variables"),
        ("void f(void (*g)(int)) { g(1); }", "no pointers to functions"),
        ("void f() { auto g = [](int x) { return x; }; }", "no lambda"),
        ("int n = 0;", "is `constant`"),
        ("#include <vector>\n", "nothing to include"),
        ("void f(uint device) {}", "`device` is a keyword"),
    ] {
        refuses(text, why);
    }
}

#[test]
fn functions_of_one_name_may_call_each_other() {
    let text = "float twice(float x) { return 2 * x; }\nfloat2 twice(float2 x) { return float2(twice(x.x), twice(x.y)); }";
    assert_eq!(refusal(text), None);
}

#[test]
fn an_error_names_the_included_file() {
    let text = "#line 1 \"common.h\"\nfloat f() { return undeclared; }".to_owned();
    let error = emulator(1).compile(&Source { name: "k.metal".into(), text, macros: vec![] }).unwrap_err();
    assert!(error.to_string().contains("common.h:1"), "{error}");
}
