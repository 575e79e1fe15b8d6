//! Plans made executable: kernels loaded, buffers allocated, and each plan captured as a graph.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use lily_gpu::decode::{self, MAX_ROWS, SPANS, Shape};
use lily_gpu::layout::{KvFormat, KvLayout, PAGE_TOKENS};
use lily_gpu::memory::shared_buffers;
use lily_gpu::plan::{Arg, Dispatch, Plan, Role};
use lily_gpu::prefill::cuda;
use lily_gpu::stage::Stage;
use lily_gpu::target::{ROW_GROUP, Target};
use lily_model::weights::Weights;

use crate::compile::Cubin;
use crate::driver::{Card, Gpu, Graph, Kernel, Memory, Module};
use crate::error::CudaError;
use crate::sources;
use crate::weights::Loaded;

/// Shared memory that every kernel may have without being asked for.
const COMMON_SHARED: u32 = 48 << 10;
/// What a block of the head leaves of a row: a logit and its index.
const BEST_BYTES: u64 = 8;
/// Where buffers begin.
const ALIGNMENT: u64 = 256;

/// The longest context of which each part is a single page.
const SHORT: usize = SPANS * PAGE_TOKENS;

/// How many rows a program takes at the most; a step takes the first that has room for it.
pub fn buckets() -> impl Iterator<Item = usize> {
    std::iter::once(1).chain((1..=MAX_ROWS / ROW_GROUP).map(|groups| groups * ROW_GROUP))
}

/// The plans of all buckets, each for short contexts and for any.
pub fn plans(weights: &Weights, target: Target) -> Vec<(Shape, Plan)> {
    let contexts = [SHORT, weights.geometry.max_context.max(SHORT)];
    let shapes = buckets().flat_map(|rows| contexts.map(|context| Shape { rows, context, sampled: false }));
    shapes.map(|shape| (shape, decode::record(weights, target, shape))).collect()
}

/// How many tokens the programs of prompts take at the most; a prompt is cut into pieces of the last one's.
pub const PROMPT_ROWS: [usize; 8] = [64, 128, 256, 512, 1024, 2048, 4096, cuda::MOST_ROWS];

/// The plans of prompts of sequences of at most `context` positions, the longer ones left out whose kernels would hand each
/// other more than `room` bytes, pages in another format not counted.
pub fn prompt_plans(weights: &Weights, target: Target, context: usize, room: u64) -> Vec<(Shape, Plan)> {
    let expanded = cuda::expanded_bytes(&weights.geometry, target.kv(), context);
    let shapes = PROMPT_ROWS.map(|rows| Shape { rows, context, sampled: false });
    let plans = shapes.into_iter().map(|shape| (shape, cuda::record(weights, target, shape)));
    plans.take_while(|(_, plan)| workspace_bytes([plan]) <= room.saturating_add(expanded)).collect()
}

/// The card that plans are made for, with keys and values stored as `kv` says.
pub fn target(card: &Card, kv: KvFormat) -> Target {
    Target::Cuda { cores: card.multiprocessors, kv }
}

/// What the program allocates, other than loading it or finding it through a sequence.
const WORKSPACE: [Role; 2] = [Role::Step, Role::Activations];

/// Bytes of the workspace that all plans share.
pub fn workspace_bytes<'p>(plans: impl IntoIterator<Item = &'p Plan>) -> u64 {
    shared_buffers(plans, &WORKSPACE).values().map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum()
}

/// All that runs a step.
pub struct Programs {
    /// In the order of `plans`.
    graphs: Vec<Graph>,
    plans: Vec<(Shape, Plan)>,
    /// In the order of `prompt_plans`.
    prompt_graphs: Vec<Graph>,
    prompt_plans: Vec<(Shape, Plan)>,
    kernels: HashMap<&'static str, Kernel>,
    addresses: HashMap<String, u64>,
    gpu: Arc<Gpu>,
    modules: Modules,
    _memory: Memory,
}

impl Programs {
    /// Loads the kernels and captures every plan.
    pub fn new(
        gpu: &Arc<Gpu>,
        mut plans: Vec<(Shape, Plan)>,
        mut prompt_plans: Vec<(Shape, Plan)>,
        cubins: &[Cubin],
        weights: &Loaded,
        kv: KvLayout,
    ) -> Result<Programs, CudaError> {
        let modules: Modules = cubins
            .iter()
            .map(|cubin| Ok((cubin.file, gpu.load(&cubin.bytes)?)))
            .collect::<Result<_, CudaError>>()?;
        for (_, plan) in &mut plans {
            take_shapes(gpu, plan, &modules, kv)?;
        }
        for (_, plan) in &mut prompt_plans {
            take_prompt_shapes(plan, &modules)?;
        }
        let both = || plans.iter().chain(&prompt_plans).map(|(_, plan)| plan);
        let kernels = kernels(gpu, both, &modules)?;
        let bytes = usize::try_from(workspace_bytes(both())).unwrap_or(usize::MAX);
        let memory = gpu.allocate("the workspace", bytes)?;
        let mut addresses = HashMap::new();
        let mut next = memory.address();
        for (name, bytes) in shared_buffers(both(), &WORKSPACE) {
            addresses.insert(name.to_owned(), next);
            next += bytes.next_multiple_of(ALIGNMENT);
        }
        let names = both().flat_map(|plan| &plan.buffers).filter(|b| b.role == Role::Weights);
        for buffer in names {
            let address = weights.address(&buffer.name).ok_or_else(|| missing(&buffer.name))?;
            addresses.insert(buffer.name.clone(), address);
        }
        let mut programs = Programs {
            graphs: Vec::new(),
            plans,
            prompt_graphs: Vec::new(),
            prompt_plans,
            kernels,
            addresses,
            gpu: Arc::clone(gpu),
            modules,
            _memory: memory,
        };
        let capture = |plans: &[(Shape, Plan)], early: bool| {
            let graph = |(_, plan): &(Shape, Plan)| {
                gpu.capture(|gpu| {
                    plan.dispatches.iter().try_for_each(|d| programs.launch(gpu, plan, d, early))
                })
            };
            plans.iter().map(graph).collect::<Result<Vec<_>, CudaError>>()
        };
        let graphs = capture(&programs.plans, true)?;
        // A prompt's kernels fill the card, and what comes early stands in their way: 12 % of 4,096 tokens.
        let prompt_graphs = capture(&programs.prompt_plans, false)?;
        (programs.graphs, programs.prompt_graphs) = (graphs, prompt_graphs);
        Ok(programs)
    }

    /// The pass for a step of `rows` rows, at most [`MAX_ROWS`], whose longest context is `context` after it.
    pub fn graph(&self, rows: usize, context: usize) -> &Graph {
        &self.graphs[self.index(rows, context)]
    }

    /// The pass for at most `rows` tokens of a prompt, where there is one.
    pub fn prompt_graph(&self, rows: usize) -> Option<&Graph> {
        let index = self.prompt_plans.iter().position(|(shape, _)| rows <= shape.rows)?;
        self.prompt_graphs.get(index)
    }

    /// The most tokens of a prompt that one pass takes; 0 where the card has no room for such passes.
    pub fn prompt_rows(&self) -> usize {
        self.prompt_plans.last().map_or(0, |(shape, _)| shape.rows)
    }

    /// The plan of the same pass.
    pub fn plan(&self, rows: usize, context: usize) -> &Plan {
        &self.plans[self.index(rows, context)].1
    }

    fn index(&self, rows: usize, context: usize) -> usize {
        let fits = |(shape, _): &(Shape, Plan)| rows <= shape.rows && context <= shape.context;
        self.plans.iter().position(fits).unwrap_or(self.plans.len() - 1)
    }

    /// Address of a buffer of the workspace or of the weights.
    pub fn address(&self, name: &str) -> Option<u64> {
        self.addresses.get(name).copied()
    }

    /// The loaded code of the file `name`.
    pub fn module(&self, name: &'static str) -> Result<&Module, CudaError> {
        let module = self.modules.iter().find(|(file, _)| *file == name);
        module.map(|(_, module)| module).ok_or_else(|| missing(name))
    }

    /// Launches one dispatch of a plan on the main stream; `early` as for [`Kernel::launch`].
    pub fn launch(&self, gpu: &Gpu, plan: &Plan, dispatch: &Dispatch, early: bool) -> Result<(), CudaError> {
        let mut addresses = Vec::with_capacity(dispatch.args.len());
        for arg in &dispatch.args {
            addresses.push(match *arg {
                Arg::Buffer(buffer, offset) => {
                    let name = &plan.buffers[buffer.0].name;
                    self.address(name).ok_or_else(|| missing(name))? + offset
                }
                // A parameter of four bytes is read from the first four.
                Arg::Value(value) => u64::from(value),
            });
        }
        let mut arguments: Vec<*mut c_void> =
            addresses.iter_mut().map(|address| (&raw mut *address).cast()).collect();
        let kernel = self.kernels.get(dispatch.kernel).ok_or_else(|| missing(dispatch.kernel))?;
        // SAFETY: the plan's arguments are the kernel's parameters in their order, and its ranges stay within the
        // buffers, which live as long as `self`.
        unsafe {
            kernel.launch(gpu, dispatch.grid, dispatch.threads, dispatch.shared_bytes, early, &mut arguments)
        }
    }
}

impl std::fmt::Debug for Programs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let graphs = self.graphs.len() + self.prompt_graphs.len();
        write!(f, "Programs({graphs} graphs on {})", self.gpu.card.name)
    }
}

/// What was compiled, by the name of its file.
type Modules = Vec<(&'static str, Module)>;

/// The launch shape that a kernel was compiled for.
fn shape_of(modules: &Modules, dispatch: &Dispatch) -> Result<[u32; 4], CudaError> {
    let file = sources::file_of(dispatch.kernel, dispatch.stage);
    let module = modules.iter().find(|(known, _)| *known == file);
    let Some((_, module)) = module else { return Err(missing(dispatch.kernel)) };
    let name = format!("{}_launch", dispatch.kernel);
    module.words(&name)?.ok_or_else(|| missing(&name))
}

/// Takes over launch shapes for prompts: blocks along x where they depend on the model alone, and how many of what the
/// plan counts along y a block takes.
fn take_prompt_shapes(plan: &mut Plan, modules: &Modules) -> Result<(), CudaError> {
    for dispatch in &mut plan.dispatches {
        let [blocks, threads, shared_bytes, rows] = shape_of(modules, dispatch)?;
        dispatch.threads = threads;
        dispatch.shared_bytes = shared_bytes;
        if blocks != 0 {
            dispatch.grid[0] = blocks;
        }
        dispatch.grid[1] = dispatch.grid[1].div_ceil(rows.max(1));
    }
    Ok(())
}

/// Takes over the launch shapes that the kernels were compiled for, as their modules name them: blocks along x,
/// threads, shared memory. How many rows a launch is for is the plan's to say.
fn take_shapes(gpu: &Gpu, plan: &mut Plan, modules: &Modules, kv: KvLayout) -> Result<(), CudaError> {
    let Plan { buffers, dispatches, .. } = plan;
    for dispatch in dispatches {
        let [blocks, threads, shared_bytes, takes_all] = shape_of(modules, dispatch)?;
        dispatch.threads = threads;
        dispatch.shared_bytes = shared_bytes;
        match dispatch.stage {
            // A block a row.
            Stage::Embed | Stage::Sample => continue,
            Stage::Head => {
                let room = buffers.iter().find(|buffer| buffer.name == "best").map_or(0, |b| b.bytes);
                let rows = u64::from(dispatch.grid[1])
                    * if dispatch.kernel == "head" { 1 } else { ROW_GROUP as u64 };
                if u64::from(blocks) * BEST_BYTES * rows > room {
                    return Err(missing("room for what the blocks of the head leave"));
                }
            }
            Stage::AttnCore if dispatch.kernel.starts_with("attn_core") => {
                // Beside what the kernel always has, its pages under way, as many as the card has room for.
                let page = kv.head_bytes() as u32;
                let room = gpu.card.shared_bytes.saturating_sub(shared_bytes) / page;
                if let Some(Arg::Value(pages)) = dispatch.args.last_mut() {
                    *pages = (*pages).min(room).max(1);
                    dispatch.shared_bytes += *pages * page;
                }
            }
            _ => {}
        }
        dispatch.grid[0] = blocks;
        // A block may take all rows, one group after the other.
        if takes_all != 0 {
            dispatch.grid[1] = 1;
        }
    }
    Ok(())
}

/// The kernels that the plans name, each with the most shared memory that one of them gives it.
fn kernels<'p, P: Iterator<Item = &'p Plan>>(
    gpu: &Gpu,
    plans: impl Fn() -> P,
    modules: &Modules,
) -> Result<HashMap<&'static str, Kernel>, CudaError> {
    let dispatches = || plans().flat_map(|plan| &plan.dispatches);
    let mut shared: HashMap<&'static str, (&'static str, u32)> = HashMap::new();
    for dispatch in dispatches() {
        let file = sources::file_of(dispatch.kernel, dispatch.stage);
        let (_, most) = shared.entry(dispatch.kernel).or_insert((file, 0));
        *most = dispatch.shared_bytes.max(*most);
    }
    let mut kernels = HashMap::new();
    for (name, (file, bytes)) in shared {
        let module = modules.iter().find(|(known, _)| *known == file).ok_or_else(|| missing(name))?;
        let kernel = module.1.kernel(name)?;
        let parameters = kernel.parameters(gpu)?;
        if let Some(other) = dispatches().find(|d| d.kernel == name && d.args.len() != parameters) {
            let found = other.args.len();
            let what = format!("{name} has {parameters} parameters and its plan {found} arguments");
            return Err(CudaError::Model(format!("{what}; please report this")));
        }
        if bytes > COMMON_SHARED {
            kernel.allow_shared(gpu, bytes)?;
        }
        kernels.insert(name, kernel);
    }
    Ok(kernels)
}

fn missing(name: &str) -> CudaError {
    CudaError::Model(format!("its plan names {name}, which nobody has; please report this"))
}
