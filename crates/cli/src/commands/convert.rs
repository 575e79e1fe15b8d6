//! `lily convert`: the 4-bit checkpoint that Lily runs, from an unquantized one.

use std::io::Write;
use std::num::NonZero;
use std::thread;

use indicatif::DecimalBytes;
use lily_model::convert::{Options, convert};
use lily_model::quantize::Rounding;

use crate::args::ConvertArgs;
use crate::{machine, models, progress};

/// Converts what `args` name.
pub fn run(args: &ConvertArgs) -> anyhow::Result<()> {
    let from = models::find(&args.from)?.dir;
    let threads = args.threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, NonZero::get));
    let rounding = if args.optimize { Rounding::LeastSquares } else { Rounding::Mlx };
    let options = Options { threads, shard_bytes: args.shard_bytes, rounding };
    let bar = progress::bytes("converting");
    let converted = convert(&from, &args.to, &options, &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let summary = converted?;
    if summary.found > 0 {
        eprintln!("lily: {} of {} weight files were there already", summary.found, summary.shards);
    }
    if summary.vision + summary.mtp > 0 {
        eprintln!(
            "lily: left out {} tensors of the vision tower and {} of the multi-token-prediction head",
            summary.vision, summary.mtp
        );
    }
    let peak = machine::resident()
        .map_or(String::new(), |resident| format!(", at most {} of memory", DecimalBytes(resident.peak)));
    writeln!(
        std::io::stdout().lock(),
        "{}: {} in {} weight files{peak}",
        args.to.display(),
        DecimalBytes(summary.bytes),
        summary.shards
    )?;
    Ok(())
}
