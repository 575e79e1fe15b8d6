//! The kernels compile for every card that Lily supports, and keep what they compute in registers.
//!
//! That needs NVIDIA's run-time compiler and no card. Where the compiler cannot be loaded the test says that it
//! has not been executed, and fails where `LILY_EXPECT_NVRTC` says that it should be.

use lily_cuda::sources::{Chip, FILES};
use lily_cuda::{compile, sources};
use lily_gpu::layout::KvFormat;
use lily_model::checkpoint::Checkpoint;
use lily_model::geometry::Geometry;

/// A100, RTX 4090, H100, RTX 5090: architecture, multiprocessors, bytes of shared memory for a block.
const CHIPS: [(&str, u32, u32); 4] =
    [("sm_80", 108, 166_912), ("sm_89", 128, 101_376), ("sm_90a", 132, 232_448), ("sm_120", 170, 101_376)];
/// Makes the assembler say what each kernel takes.
const VERBOSE: &str = "--ptxas-options=-v";

/// Kernels of a compiler's log that keep something in memory which they have no registers for.
fn spilling(log: &str) -> Vec<String> {
    let mut kernel = "";
    let mut spilling = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or_default();
        }
        if line.contains("bytes spill stores") && !line.contains(" 0 bytes spill stores, 0 bytes spill loads")
        {
            spilling.push(format!("{kernel}: {}", line.trim()));
        }
    }
    spilling
}

#[test]
fn every_kernel_compiles_for_every_architecture_and_none_spills() {
    let Some((major, minor)) = compile::version() else {
        assert!(
            std::env::var_os("LILY_EXPECT_NVRTC").is_none(),
            "LILY_EXPECT_NVRTC is set, and NVRTC cannot be loaded"
        );
        println!("NOT EXECUTED: the CUDA kernels were not compiled, as there is no NVRTC here");
        return;
    };
    println!("NVRTC {major}.{minor}");
    let demo = Checkpoint::demo().unwrap();
    // The format of keys and values is attention's alone.
    let attention: Vec<_> = FILES.into_iter().filter(|file| file.name.starts_with("attn_core")).collect();
    assert_eq!(attention.len(), 2);
    let (full, formats) =
        (Geometry::qwen3_6_35b_a3b(), [(KvFormat::F16, &FILES[..]), (KvFormat::Q8, &attention)]);
    let cases =
        [&full, demo.geometry()].into_iter().flat_map(|geometry| formats.map(|format| (geometry, format)));
    for (geometry, (kv, files)) in cases {
        for (architecture, multiprocessors, shared_bytes) in CHIPS {
            let chip = Chip { architecture: architecture.to_owned(), multiprocessors, shared_bytes };
            let mut flags = sources::flags(geometry, kv, &chip);
            flags.push(VERBOSE.to_owned());
            std::thread::scope(|scope| {
                for &file in files {
                    let flags = &flags;
                    scope.spawn(move || {
                        let (cubin, log) = compile::compile(file, architecture, flags).unwrap();
                        let log = log.expect("the assembler says what each kernel takes");
                        assert!(!cubin.is_empty() && log.contains("Compiling entry function"), "{log}");
                        let spilling = spilling(&log);
                        assert!(
                            spilling.is_empty(),
                            "{} of {kv:?} on {architecture}: {spilling:?}",
                            file.name
                        );
                    });
                }
            });
        }
    }
}

#[test]
fn a_spill_is_seen_in_the_log() {
    let log = "ptxas info : Compiling entry function 'head' for 'sm_80'\n\
               ptxas . 8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
               ptxas info : Compiling entry function 'embed' for 'sm_80'\n\
               ptxas . 8 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads\n";
    let found = spilling(log);
    assert!(found.len() == 1 && found[0].starts_with("embed: "), "{found:?}");
}
