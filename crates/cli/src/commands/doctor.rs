//! `lily doctor`: one page about this machine, and whether the model can run here.
//!
//! It loads nothing and changes nothing. `backends` asks each backend whether it works, `limits` what the system
//! allows, and `report` holds what was found; memory comes from the same plans that the backends themselves keep to.

mod backends;
mod limits;
mod report;

use anyhow::{Context, bail};
use lily_hub::{Settings, cache::Cache};
use lily_model::geometry::Geometry;
use lily_model::weights::Weights;

use crate::args::{DoctorArgs, KvCacheType, ModelArgs};
use crate::{device, machine, models, output};

use report::{Disk, Machine, Model, Report};

/// Bytes of the published 4-bit checkpoint with all that belongs to it, rounded up.
const DOWNLOAD_BYTES: u64 = 21_000_000_000;
/// Bytes of the tensors that Lily reads of it.
const WEIGHT_BYTES: u64 = 19_508_789_376;

/// Prints the page, or JSON; an error where something stands in the model's way.
pub fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let report = look(args)?;
    output::print(&report, &report, args.json)?;
    match report.problems.len() {
        0 => Ok(()),
        1 => bail!("one thing stands in the way of {}; it is named above", report.model.name),
        count => bail!("{count} things stand in the way of {}; they are named above", report.model.name),
    }
}

fn look(args: &DoctorArgs) -> anyhow::Result<Report> {
    let (model, weights) = model(args)?;
    let most = weights.geometry.max_context;
    if args.ctx_len > most {
        bail!("--ctx-len {} is more than the {most} tokens of {}; ask for less", args.ctx_len, model.name);
    }
    let kv_cache_type = args.kv_cache_type;
    let backends = backends::all(&weights, model.weight_bytes, args.ctx_len, kv_cache_type);
    // What is added to a command.
    let flags = match kv_cache_type {
        KvCacheType::F16 => "",
        KvCacheType::Q8 => " --kv-cache-type q8",
    };
    let (place, reason) = device::choose(&ModelArgs { kv_cache_type, ..ModelArgs::default() })?;
    let taken = backends::name(place);
    let disk = if model.path.is_none() { Some(disk()?) } else { None };
    let limits = limits::all(model.weight_bytes);
    let next = match &model.path {
        Some(path) => format!("lily chat --model-path {}{flags}", path.display()),
        None => "lily pull".to_owned(),
    };
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine {
            system: std::env::consts::OS,
            architecture: std::env::consts::ARCH,
            processor: machine::cpu_name(),
            cores: lily_cpu::pool::physical_cores(),
            memory_bytes: machine::memory_bytes(),
            available_bytes: lily_cpu::limits::free_bytes().map(|bytes| bytes as u64),
        },
        model,
        backends,
        taken,
        reason,
        disk,
        limits,
        problems: Vec::new(),
        next,
    };
    report.problems = report.find_problems();
    if !report.problems.is_empty() {
        report.next =
            "what stands in the way first, then this command again; meanwhile `lily chat` runs the \
                       built-in demo"
                .to_owned();
    }
    Ok(report)
}

/// The model that is asked about, by its shapes. Nothing is fetched.
fn model(args: &DoctorArgs) -> anyhow::Result<(Model, Weights)> {
    let (context, kv_cache_type) = (args.ctx_len, args.kv_cache_type);
    let path = match &args.model_path {
        Some(path) => {
            if let Some(repo) = models::repository(path)
                && models::here(&repo)?.is_none()
            {
                bail!("{repo} is not here whole; `lily pull {repo}` brings it");
            }
            Some(path.clone())
        }
        None => models::here(&models::DEFAULT.parse()?)?.map(|_| models::DEFAULT.into()),
    };
    match path {
        Some(path) => {
            let checkpoint = models::open(&path)?;
            let weights =
                checkpoint.weights().with_context(|| format!("{} cannot be loaded", path.display()))?;
            let (name, weight_bytes) = (checkpoint.name().to_owned(), checkpoint.weight_bytes());
            Ok((Model { name, path: Some(path), weight_bytes, context, kv_cache_type }, weights))
        }
        None => {
            let name = "Qwen3.6-35B-A3B, 4-bit".to_owned();
            let weights = Weights::outline(&Geometry::qwen3_6_35b_a3b());
            Ok((Model { name, path: None, weight_bytes: WEIGHT_BYTES, context, kv_cache_type }, weights))
        }
    }
}

/// The disk on which the model would go.
fn disk() -> anyhow::Result<Disk> {
    let dir = Settings::from_env()?.cache;
    // The cache is made with the first file.
    let there = dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(&dir);
    let free_bytes = fs4::available_space(there)
        .with_context(|| format!("the disk of {} cannot be asked", there.display()))?;
    let here = Cache::new(&dir, &models::DEFAULT.parse()?).bytes();
    Ok(Disk { dir, free_bytes, needed_bytes: DOWNLOAD_BYTES.saturating_sub(here) })
}
