//! Which device runs the model, and why that one.

use std::fmt;

use anyhow::bail;
use lily_cpu::footprint::Footprint;
use lily_cpu::pool::physical_cores;
use lily_cpu::{CpuBackend, CpuOptions};
use lily_engine::backend::Backend;
use lily_gpu::memory::Context;
use lily_model::checkpoint::Checkpoint;

use crate::args::{BackendKind, ModelArgs};
use crate::budget::Budget;
use crate::machine;

/// A model on a device.
pub struct Opened {
    /// It.
    pub backend: Box<dyn Backend>,
    /// The memory that it takes.
    pub memory: MemoryUse,
    /// Why it is this device.
    pub chosen: String,
}

/// What a model takes of a device's memory.
#[derive(Clone, Debug)]
pub enum MemoryUse {
    /// Of the machine's: weights mapped, state beside them.
    Machine(Budget),
    /// Of a card's, which holds everything.
    #[cfg(not(target_os = "macos"))]
    Card(lily_cuda::memory_plan::MemoryPlan),
    /// Of what macOS lets the GPU keep of the machine's.
    #[cfg(target_os = "macos")]
    Gpu(lily_metal::memory_plan::MemoryPlan),
}

impl MemoryUse {
    /// Bytes that one sequence of the whole context takes.
    pub fn own(&self) -> u64 {
        match self {
            MemoryUse::Machine(budget) => budget.own,
            #[cfg(not(target_os = "macos"))]
            MemoryUse::Card(plan) => plan.sequence,
            #[cfg(target_os = "macos")]
            MemoryUse::Gpu(plan) => plan.sequence,
        }
    }

    /// Bytes that are left beside all that, where the system tells.
    pub fn left(&self) -> Option<u64> {
        match self {
            MemoryUse::Machine(budget) => budget.left(),
            #[cfg(not(target_os = "macos"))]
            MemoryUse::Card(plan) => Some(plan.state - plan.sequence),
            #[cfg(target_os = "macos")]
            MemoryUse::Gpu(plan) => Some(plan.state - plan.sequence),
        }
    }

    /// Bytes of weights that are mapped files in the machine's memory.
    pub fn mapped_weights(&self) -> u64 {
        match self {
            MemoryUse::Machine(budget) => budget.weights,
            #[cfg(not(target_os = "macos"))]
            MemoryUse::Card(plan) => plan.weights,
            #[cfg(target_os = "macos")]
            MemoryUse::Gpu(plan) => plan.weights,
        }
    }

    /// Whether the weights can stay where they are at full speed.
    pub fn is_resident(&self) -> bool {
        match self {
            MemoryUse::Machine(budget) => budget.is_resident(),
            #[cfg(not(target_os = "macos"))]
            MemoryUse::Card(_) => true,
            #[cfg(target_os = "macos")]
            MemoryUse::Gpu(_) => true,
        }
    }
}

impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemoryUse::Machine(budget) => budget.fmt(f),
            #[cfg(not(target_os = "macos"))]
            MemoryUse::Card(plan) => plan.fmt(f),
            #[cfg(target_os = "macos")]
            MemoryUse::Gpu(plan) => plan.fmt(f),
        }
    }
}

/// Where a model can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The processor.
    Cpu,
    /// An NVIDIA card, counted as the driver does.
    #[cfg(not(target_os = "macos"))]
    Card(usize),
    /// An Apple GPU, counted among those that will do.
    #[cfg(target_os = "macos")]
    Gpu(usize),
}

impl Place {
    /// Whether it is an NVIDIA card.
    fn is_card(self) -> bool {
        match self {
            Place::Cpu => false,
            #[cfg(not(target_os = "macos"))]
            Place::Card(_) => true,
            #[cfg(target_os = "macos")]
            Place::Gpu(_) => false,
        }
    }
}

/// Where `args` want the model to run, and why there.
///
/// # Errors
/// A device that was asked for and is not there, or that does not have what was asked for.
pub fn choose(args: &ModelArgs) -> anyhow::Result<(Place, String)> {
    let (place, chosen) = choose_place(args)?;
    if args.gpu_memory.is_some() && !place.is_card() {
        bail!("--gpu-memory is for NVIDIA cards, and this runs elsewhere ({chosen}); leave it out");
    }
    Ok((place, chosen))
}

fn choose_place(args: &ModelArgs) -> anyhow::Result<(Place, String)> {
    match args.backend {
        BackendKind::Cpu => Ok((Place::Cpu, "asked for".to_owned())),
        #[cfg(target_os = "macos")]
        BackendKind::Metal => Ok((Place::Gpu(args.device), "asked for".to_owned())),
        #[cfg(not(target_os = "macos"))]
        BackendKind::Metal => bail!("Metal needs macOS; use --backend auto, cuda or cpu"),
        #[cfg(not(target_os = "macos"))]
        BackendKind::Cuda => Ok((Place::Card(args.device), "asked for".to_owned())),
        #[cfg(not(target_os = "macos"))]
        BackendKind::Auto => Ok(match lily_cuda::driver::count() {
            Ok(0) => (Place::Cpu, "the NVIDIA driver sees no card".to_owned()),
            Ok(_) => (Place::Card(args.device), "the driver sees it".to_owned()),
            Err(error) => (Place::Cpu, error.to_string()),
        }),
        #[cfg(target_os = "macos")]
        BackendKind::Cuda => bail!("there is no CUDA on macOS; use --backend cpu"),
        #[cfg(target_os = "macos")]
        BackendKind::Auto => {
            let reason = "the Metal backend has not run on a Mac yet; --backend metal tries it";
            Ok((Place::Cpu, reason.to_owned()))
        }
    }
}

/// Opens the checkpoint's model on the device that `args` ask for, with the context that they ask for, else
/// `usual` tokens or what there is room for. `state` is the most that sequences and snapshots may take of the
/// machine's memory; a card gives them all that it has left.
///
/// # Errors
/// Where the device that was asked for will not do. Where none was, the processor takes over, and standard error
/// has the reason.
pub fn open(
    args: &ModelArgs,
    checkpoint: &Checkpoint,
    usual: usize,
    state: &dyn Fn(&Budget) -> usize,
) -> anyhow::Result<Opened> {
    let (place, chosen) = choose(args)?;
    match place {
        Place::Cpu => on_cpu(args, checkpoint, usual, state, chosen),
        #[cfg(not(target_os = "macos"))]
        Place::Card(index) => {
            let asked = checked_context(args, checkpoint)?;
            let context = asked.map_or(Context::AtMost(usual), Context::Exactly);
            match on_card(index, args, checkpoint, context, chosen) {
                Err(error) if args.backend == BackendKind::Auto => {
                    eprintln!("lily: the CPU takes over: {error}");
                    on_cpu(args, checkpoint, usual, state, error.to_string())
                }
                opened => opened,
            }
        }
        #[cfg(target_os = "macos")]
        Place::Gpu(index) => on_gpu(index, args, checkpoint, usual, chosen),
    }
}

#[cfg(target_os = "macos")]
fn on_gpu(
    index: usize,
    args: &ModelArgs,
    checkpoint: &Checkpoint,
    usual: usize,
    chosen: String,
) -> anyhow::Result<Opened> {
    use lily_metal::apple::AppleDevice;
    use lily_metal::{MetalBackend, MetalOptions};

    let context = checked_context(args, checkpoint)?.map_or(Context::AtMost(usual), Context::Exactly);
    let device = AppleDevice::open(index)?;
    let kv_format = args.kv_cache_type.pages();
    let options = MetalOptions { context, kv_format, ..MetalOptions::default() };
    let backend = MetalBackend::new(&device, &checkpoint.weights()?, &options)?;
    let memory = MemoryUse::Gpu(*backend.memory_plan());
    Ok(Opened { backend: Box::new(backend), memory, chosen })
}

#[cfg(not(target_os = "macos"))]
fn on_card(
    index: usize,
    args: &ModelArgs,
    checkpoint: &Checkpoint,
    context: Context,
    chosen: String,
) -> anyhow::Result<Opened> {
    use lily_cuda::cache::Cache;
    use lily_cuda::{CudaBackend, CudaOptions};

    let options = CudaOptions {
        device: index,
        context,
        memory_bytes: args.gpu_memory.unwrap_or(u64::MAX),
        kv_format: args.kv_cache_type.pages(),
        cache: Cache::of_user(),
    };
    let bar = crate::progress::bytes("copying the weights to the card");
    let backend = CudaBackend::new(&checkpoint.weights()?, &options, &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let backend = backend?;
    let memory = MemoryUse::Card(*backend.memory_plan());
    Ok(Opened { backend: Box::new(backend), memory, chosen })
}

fn on_cpu(
    args: &ModelArgs,
    checkpoint: &Checkpoint,
    usual: usize,
    state: &dyn Fn(&Budget) -> usize,
    chosen: String,
) -> anyhow::Result<Opened> {
    let budget = cpu_budget(args, checkpoint, usual)?;
    let options = CpuOptions {
        threads: args.threads,
        ctx_len: budget.context,
        state_bytes: state(&budget),
        numerics: args.kv_cache_type.numerics(),
        ..CpuOptions::default()
    };
    let backend = Box::new(CpuBackend::new(checkpoint.weights()?, options)?);
    Ok(Opened { backend, memory: MemoryUse::Machine(budget), chosen })
}

/// The context that `args` ask for, where they do.
///
/// # Errors
/// One that is longer than the model's.
fn checked_context(args: &ModelArgs, checkpoint: &Checkpoint) -> anyhow::Result<Option<usize>> {
    let most = checkpoint.geometry().max_context;
    match args.ctx_len {
        Some(asked) if asked > most => {
            bail!("--ctx-len {asked} is more than the {most} tokens of {}; ask for less", checkpoint.name())
        }
        asked => Ok(asked),
    }
}

/// The memory that the checkpoint's model takes of the machine at the context that `args` ask for, else at `usual`
/// or what the model and the machine have room for.
///
/// # Errors
/// A context that is longer than the model's, or that does not fit the machine.
pub fn cpu_budget(args: &ModelArgs, checkpoint: &Checkpoint, usual: usize) -> anyhow::Result<Budget> {
    let geometry = checkpoint.geometry();
    let asked = checked_context(args, checkpoint)?;
    let threads = args.threads.unwrap_or_else(physical_cores);
    let format = args.kv_cache_type.numerics().kv_format();
    let own = |tokens| Footprint::new(geometry, format, threads, tokens).total() as u64;
    let usual = usual.min(geometry.max_context);
    Budget::new(asked, usual, checkpoint.weight_bytes(), machine::memory_bytes(), own)
}

/// The longest context that `args` leave room for on the device that they ask for.
///
/// # Errors
/// As [`open`], where the device or the context that was asked for will not do.
pub fn most_context(args: &ModelArgs, checkpoint: &Checkpoint) -> anyhow::Result<usize> {
    match choose(args)?.0 {
        Place::Cpu => Ok(cpu_budget(args, checkpoint, usize::MAX)?.context),
        // How much of it fits is known once the model is on the card.
        #[cfg(not(target_os = "macos"))]
        Place::Card(_) => Ok(checked_context(args, checkpoint)?.unwrap_or(checkpoint.geometry().max_context)),
        #[cfg(target_os = "macos")]
        Place::Gpu(_) => Ok(checked_context(args, checkpoint)?.unwrap_or(checkpoint.geometry().max_context)),
    }
}
