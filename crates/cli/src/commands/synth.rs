//! `lily synth`: random weights in the real layout, to measure speed and memory without the real model.

use std::io::Write;

use anyhow::bail;
use lily_model::geometry::Geometry;
use lily_model::synth;

use crate::args::SynthArgs;
use crate::progress;

/// Three Gated DeltaNet layers and one of full attention: the pattern that depth repeats.
const LAYER_PATTERN: usize = 4;

/// Writes what `args` name.
pub fn run(args: &SynthArgs) -> anyhow::Result<()> {
    let mut geometry = Geometry::qwen3_6_35b_a3b();
    let most = geometry.layers.len();
    if args.layers > most || !args.layers.is_multiple_of(LAYER_PATTERN) {
        bail!("--layers {} is not a multiple of {LAYER_PATTERN} up to {most}", args.layers);
    }
    geometry.layers.truncate(args.layers);
    let bar = progress::bytes("writing");
    let summary = synth::write(&args.out, &geometry, args.seed, &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    writeln!(
        std::io::stdout().lock(),
        "{}: {} layers, {} bytes in {} weight files, seed {}",
        args.out.display(),
        args.layers,
        summary.bytes,
        summary.shards,
        args.seed
    )?;
    Ok(())
}
