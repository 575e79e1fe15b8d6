//! Lily's own kernels are what Metal takes, as far as that can be told here.

use lily_gpu::layout::KvFormat;
use lily_gpu::stage::Stage;
use lily_metal::device::{Device, Pipeline};
use lily_metal::sources;
use lily_model::checkpoint::Checkpoint;
use lily_model::geometry::Geometry;

use crate::support::emulator;

#[test]
fn every_kernel_keeps_the_rules_of_metal_and_fits_threadgroup_memory() {
    let gpu = emulator(1);
    let demo = Checkpoint::demo().unwrap();
    for geometry in [&Geometry::qwen3_6_35b_a3b(), demo.geometry()] {
        let sources = Stage::ALL.map(|stage| sources::source(stage, geometry, KvFormat::F16));
        let attention = sources::source(Stage::AttnCore, geometry, KvFormat::Q8);
        for source in sources.iter().chain([&attention]) {
            let library = gpu.compile(source).unwrap_or_else(|error| panic!("{error}"));
            assert!(!library.kernels().is_empty());
            for name in library.kernels() {
                let bytes = gpu.pipeline(&library, name).unwrap().threadgroup_memory();
                assert!(
                    bytes <= gpu.info().threadgroup_memory,
                    "{name} has {bytes} bytes of threadgroup memory"
                );
            }
        }
    }
}
