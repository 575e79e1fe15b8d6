//! Which backends there are on this machine, whether each works, and what the model would take of its memory.

use lily_cpu::footprint::Footprint;
use lily_cpu::isa::Isa;
use lily_cpu::pool::physical_cores;
use lily_gpu::memory::Context;
use lily_model::weights::Weights;

use super::report::{Backend, Room, gb};
use crate::args::KvCacheType;
use crate::budget::Budget;
use crate::device::Place;
use crate::machine;

/// The name of the backend that runs at `place`.
pub fn name(place: Place) -> &'static str {
    match place {
        Place::Cpu => "cpu",
        #[cfg(not(target_os = "macos"))]
        Place::Card(_) => "cuda",
        #[cfg(target_os = "macos")]
        Place::Gpu(_) => "metal",
    }
}

/// All backends, with the room that each has for the model of `weights` at `context` tokens, stored as `kv` says.
/// `bytes` is what the model's files take once they are mapped.
pub fn all(weights: &Weights, bytes: u64, context: usize, kv: KvCacheType) -> Vec<Backend> {
    let mut all = vec![cpu(weights, bytes, context, kv)];
    all.extend(cuda(weights, context, kv));
    all.extend(metal(weights, context, kv));
    all
}

/// The processor, which always works.
fn cpu(weights: &Weights, bytes: u64, context: usize, kv: KvCacheType) -> Backend {
    let (geometry, threads) = (&weights.geometry, physical_cores());
    let format = kv.numerics().kv_format();
    let own = |tokens| Footprint::new(geometry, format, threads, tokens).total() as u64;
    let budget = |asked, usual| Budget::new(asked, usual, bytes, machine::memory_bytes(), own);
    let (fits, says) = match budget(Some(context), context) {
        Ok(planned) => (planned.is_resident(), planned.to_string()),
        Err(error) => (false, error.to_string()),
    };
    let most_context = budget(None, geometry.max_context).ok().map(|most| most.context);
    let room = Room { fits, says, most_context };
    let isa = Isa::detect();
    let slow = if isa == Isa::Portable {
        ": no vector instructions that Lily has kernels for, so it is slow"
    } else {
        ""
    };
    let cores = if threads == 1 { "core" } else { "cores" };
    Backend { name: "cpu", works: true, says: format!("{isa} on {threads} {cores}{slow}"), room: Some(room) }
}

#[cfg(not(target_os = "macos"))]
fn cuda(weights: &Weights, context: usize, kv: KvCacheType) -> Vec<Backend> {
    use lily_cuda::CudaError;
    use lily_cuda::driver::{self, Gpu};
    use lily_cuda::memory_plan::MemoryPlan;

    let refused =
        |error: CudaError| Backend { name: "cuda", works: false, says: error.to_string(), room: None };
    let count = match driver::count() {
        Ok(0) => return vec![refused(CudaError::NoDevice { asked: 0, count: 0 })],
        Ok(count) => count,
        Err(error) => return vec![refused(error)],
    };
    let Some((major, minor)) = lily_cuda::compile::version() else {
        return vec![refused(CudaError::NoCompiler)];
    };
    let card = |index| {
        let gpu = match Gpu::open(index) {
            Ok(gpu) => gpu,
            Err(error) => return refused(error),
        };
        let card = &gpu.card;
        let says = format!(
            "device {index}: {}, compute capability {}.{}, {}; driver for CUDA {}.{}, NVRTC {major}.{minor}",
            card.name,
            card.capability.0,
            card.capability.1,
            gb(card.memory),
            card.driver / 1000,
            card.driver % 1000 / 10,
        );
        let plan = |context| {
            MemoryPlan::of_model(&gpu, weights, kv.pages(), context, u64::MAX).map(|planned| planned.memory)
        };
        let most = plan(Context::AtMost(usize::MAX)).ok().map(|plan| plan.context);
        let room = room(plan(Context::Exactly(context)), most);
        Backend { name: "cuda", works: true, says, room: Some(room) }
    };
    (0..count).map(card).collect()
}

#[cfg(target_os = "macos")]
fn cuda(_: &Weights, _: usize, _: KvCacheType) -> Vec<Backend> {
    vec![Backend { name: "cuda", works: false, says: "there is no CUDA on macOS".to_owned(), room: None }]
}

#[cfg(target_os = "macos")]
fn metal(weights: &Weights, context: usize, kv: KvCacheType) -> Vec<Backend> {
    use lily_metal::Device;
    use lily_metal::apple::AppleDevice;
    use lily_metal::memory_plan::MemoryPlan;
    use lily_metal::program::SHORT;
    use lily_metal::tensors;

    let device = match AppleDevice::open(0) {
        Ok(device) => device,
        Err(error) => {
            return vec![Backend { name: "metal", works: false, says: error.to_string(), room: None }];
        }
    };
    let info = device.info();
    let says = format!(
        "{}, {} cores, of whose memory macOS lets it keep {}; prompts {} tensors; not yet run on a Mac, so taken with --backend metal only",
        info.name,
        info.cores,
        gb(info.working_set),
        if tensors::are_faster(info, tensors::BLOCK_ROWS, tensors::FEWEST_ROWS) {
            "with Metal 4's"
        } else {
            "without"
        }
    );
    let plan = |context| {
        MemoryPlan::of_model(&device, weights, kv.pages(), context, SHORT, u64::MAX)
            .map(|planned| planned.memory)
    };
    let most = plan(Context::AtMost(usize::MAX)).ok().map(|plan| plan.context);
    vec![Backend {
        name: "metal",
        works: true,
        says,
        room: Some(room(plan(Context::Exactly(context)), most)),
    }]
}

#[cfg(not(target_os = "macos"))]
fn metal(_: &Weights, _: usize, _: KvCacheType) -> Vec<Backend> {
    vec![Backend { name: "metal", works: false, says: "Metal needs macOS".to_owned(), room: None }]
}

/// The room on a GPU, which has a plan or an error that says why not.
fn room(plan: Result<impl ToString, impl ToString>, most_context: Option<usize>) -> Room {
    let (fits, says) = match plan {
        Ok(plan) => (true, plan.to_string()),
        Err(error) => (false, error.to_string()),
    };
    Room { fits, says, most_context }
}
