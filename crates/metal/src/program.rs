//! Plans made executable: kernels compiled, buffers allocated, and each plan as the dispatches of a pass.

use std::collections::HashMap;
use std::thread;

use lily_gpu::decode::{self, MAX_ROWS, SPANS, Shape};
use lily_gpu::layout::{KvFormat, PAGE_TOKENS};
use lily_gpu::memory::shared_buffers;
use lily_gpu::plan::{Arg, BufferId, Plan, Role};
use lily_gpu::prefill::metal::{self, PASSES};
use lily_gpu::stage::Stage;
use lily_gpu::target::Target;
use lily_model::geometry::Geometry;
use lily_model::weights::Weights;

use crate::device::{Argument, Buffer, Device, DeviceInfo, Dispatch, Pipeline, Source, Touch};
use crate::error::{DeviceError, MetalError};
use crate::reach::{PoolAccess, Reach};
use crate::slot::Slot;
use crate::sources;
use crate::store::{Pools, Store};
use crate::tensors::{self, Products};
use crate::weights::Loaded;

/// How many rows a plan takes at the most; a step takes the first that has room for it.
const BUCKETS: [usize; 5] = [1, 4, 8, 16, MAX_ROWS];
/// The longest context of which each part is a single page: what the short layout of attention is for.
pub const SHORT: usize = SPANS * PAGE_TOKENS;

/// The plans of all buckets: for contexts of at most `short` tokens, and for any; for greedy tokens, and for tokens as
/// requests ask. Keys and values are stored as `kv` says.
pub fn plans(weights: &Weights, info: &DeviceInfo, short: usize, kv: KvFormat) -> Vec<(Shape, Plan)> {
    let target = Target::Metal { cores: info.cores, kv };
    // A plan for more than `SHORT` tokens has the long layout.
    let contexts = [short.clamp(1, SHORT), weights.geometry.max_context.max(SHORT + 1)];
    let shapes = [false, true].into_iter().flat_map(|sampled| {
        BUCKETS.into_iter().flat_map(move |rows| contexts.map(|context| Shape { rows, context, sampled }))
    });
    shapes.map(|shape| (shape, decode::record(weights, target, shape))).collect()
}

/// The plans of prompts, the longer ones left out whose kernels would hand each other more than `room` bytes; for greedy
/// tokens and for tokens as requests ask. Keys and values are stored as `kv` says.
pub fn prompt_plans(weights: &Weights, info: &DeviceInfo, room: u64, kv: KvFormat) -> Vec<(Shape, Plan)> {
    let target = Target::Metal { cores: info.cores, kv };
    let shapes = PASSES.into_iter().flat_map(|rows| {
        let context = weights.geometry.max_context.max(rows);
        [false, true].map(|sampled| Shape { rows, context, sampled })
    });
    let plans = shapes.map(|shape| (shape, metal::record(weights, target, shape)));
    let fits = |(shape, plan): &(Shape, Plan)| shape.rows == PASSES[0] || workspace_bytes([plan]) <= room;
    plans.take_while(fits).collect()
}

/// Bytes of what the plans' kernels hand to each other.
pub fn workspace_bytes<'a>(plans: impl IntoIterator<Item = &'a Plan>) -> u64 {
    shared_buffers(plans, &[Role::Activations]).values().sum()
}

/// What a pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A step of decode: at most [`MAX_ROWS`] rows, whose longest context is [`Shape::context`] after it.
    Step(Shape),
    /// At most [`Programs::prompt_rows`] tokens of a prompt, which has [`Shape::context`] positions then.
    Prompt(Shape),
}

/// All that turns a step into a pass.
#[derive(Debug)]
pub struct Programs<D: Device> {
    /// Those of decode, then those of prompts.
    plans: Vec<(Shape, Plan)>,
    /// How many are of decode.
    steps: usize,
    pipelines: Pipelines<D>,
    /// Of products, with tensors: none where none are taken.
    tensor_pipelines: Pipelines<D>,
    info: DeviceInfo,
    workspace: HashMap<String, D::Buffer>,
    weights: Loaded<D::Buffer>,
    geometry: Geometry,
    /// Plans for slots, as long as the pools are where they were.
    recorded: HashMap<(usize, Products, usize), Recorded<D>>,
    pools: Option<Pools<D::Buffer>>,
}

/// Kernels by name.
type Pipelines<D> = HashMap<&'static str, <D as Device>::Pipeline>;

/// The dispatches of a plan for a slot.
#[derive(Debug)]
struct Recorded<D: Device> {
    dispatches: Vec<Dispatch<D>>,
    /// Of each dispatch, how many touches are the same in all steps, and what it touches of the pools.
    pool_accesses: Vec<(usize, Vec<PoolAccess>)>,
}

/// What a plan is made a pass for.
pub struct StepPlace<'a, D: Device> {
    /// Which slot it is.
    pub number: usize,
    /// The slot.
    pub slot: &'a Slot<D>,
    /// Where sequences have their memory.
    pub store: &'a Store<D>,
    /// What the step touches of it.
    pub reach: &'a Reach,
}

impl<D: Device> Programs<D> {
    /// Compiles the kernels, for keys and values that are stored as `kv` says, and allocates the workspace. Where passes of prompts
    /// are faster with tensors, and the device's tensors multiply as they should, those kernels are compiled with them too
    /// ([`tensors`]); the log says where they do not.
    ///
    /// # Errors
    /// A kernel that the device does not take, or no memory.
    pub fn new(
        device: &D,
        geometry: &Geometry,
        kv: KvFormat,
        mut plans: Vec<(Shape, Plan)>,
        prompt_plans: Vec<(Shape, Plan)>,
        weights: Loaded<D::Buffer>,
    ) -> Result<Programs<D>, MetalError> {
        let steps = plans.len();
        plans.extend(prompt_plans);
        let sources = Stage::ALL.map(|stage| (stage, sources::source(stage, geometry, kv)));
        let libraries = compile(device, &sources)?;
        let mut pipelines: Pipelines<D> = HashMap::new();
        for dispatch in plans.iter().flat_map(|(_, plan)| &plan.dispatches) {
            let pipeline = match pipelines.get(dispatch.kernel) {
                Some(pipeline) => pipeline,
                None => {
                    let pipeline = pipeline(device, &libraries, dispatch.kernel, dispatch.stage)?;
                    pipelines.entry(dispatch.kernel).or_insert(pipeline)
                }
            };
            check(device.info(), pipeline, dispatch).map_err(MetalError::Model)?;
        }
        let tensor_pipelines = tensor_pipelines(device, geometry, &sources, &plans[steps..])?;
        let workspace = shared_buffers(plans.iter().map(|(_, plan)| plan), &[Role::Activations])
            .into_iter()
            .map(|(name, bytes)| Ok((name.to_owned(), device.allocate(name, bytes as usize)?)))
            .collect::<Result<_, DeviceError>>()?;
        Ok(Programs {
            plans,
            steps,
            pipelines,
            tensor_pipelines,
            info: device.info().clone(),
            workspace,
            weights,
            geometry: geometry.clone(),
            recorded: HashMap::new(),
            pools: None,
        })
    }

    /// Where the weights lie.
    pub fn weights(&self) -> &Loaded<D::Buffer> {
        &self.weights
    }

    /// A buffer of the workspace.
    pub fn workspace(&self, name: &str) -> Option<&D::Buffer> {
        self.workspace.get(name)
    }

    /// The most tokens of a prompt that a pass takes.
    pub fn prompt_rows(&self) -> usize {
        self.plans[self.steps..].iter().map(|(shape, _)| shape.rows).max().unwrap_or(0)
    }

    /// The plan for `work`.
    pub fn plan(&self, work: Work) -> &Plan {
        &self.plans[self.index(work)].1
    }

    /// The first plan that has room, or else the largest.
    fn index(&self, work: Work) -> usize {
        let (first, end, Shape { rows, context, sampled }) = match work {
            Work::Step(shape) => (0, self.steps, shape),
            Work::Prompt(shape) => (self.steps, self.plans.len(), shape),
        };
        let fits = |(shape, _): &(Shape, Plan)| {
            rows <= shape.rows && context <= shape.context && sampled == shape.sampled
        };
        self.plans[first..end].iter().position(fits).map_or(end - 1, |place| first + place)
    }

    /// The dispatches of that plan, for a slot, with the pools where they are now.
    ///
    /// # Errors
    /// A plan that names what nobody has.
    pub fn dispatches(
        &mut self,
        work: Work,
        place: &StepPlace<'_, D>,
    ) -> Result<&[Dispatch<D>], DeviceError> {
        let pools = place.store.pools();
        if self.pools.as_ref() != Some(&pools) {
            self.recorded.clear();
            self.pools = Some(pools.clone());
        }
        let index = self.index(work);
        let (shape, plan) = &self.plans[index];
        let with_tensors = match work {
            Work::Prompt(Shape { rows, .. }) if !self.tensor_pipelines.is_empty() => {
                Products::of_prompt(&self.info, &self.geometry, shape.rows, rows)
            }
            _ => Products::default(),
        };
        let key = (index, with_tensors, place.number);
        let recorded = match self.recorded.remove(&key) {
            Some(recorded) => recorded,
            None => self.record(plan, with_tensors, place.slot, &pools)?,
        };
        let recorded = self.recorded.entry(key).or_insert(recorded);
        if D::WATCHES {
            for (dispatch, (always, accesses)) in recorded.dispatches.iter_mut().zip(&recorded.pool_accesses)
            {
                dispatch.touches.truncate(*always);
                let touches =
                    accesses.iter().flat_map(|access| access.touches(place.store, &pools, place.reach));
                dispatch.touches.extend(touches);
            }
        }
        Ok(&recorded.dispatches)
    }

    fn record(
        &self,
        plan: &Plan,
        with_tensors: Products,
        slot: &Slot<D>,
        pools: &Pools<D::Buffer>,
    ) -> Result<Recorded<D>, DeviceError> {
        let place = |id: BufferId| {
            let buffer = &plan.buffers[id.0];
            let (name, role) = (buffer.name.as_str(), buffer.role);
            let found = match (role, name) {
                (Role::Weights, _) => self.weights.place(name),
                (Role::Kv, _) => Some((&pools.pages, 0)),
                (Role::State, "sampled") => Some((&pools.tokens, 0)),
                (Role::State, "recipes") => Some((&pools.recipes, 0)),
                (Role::State, "tables") => Some((&pools.tables, 0)),
                (Role::State, _) => Some((&pools.states, 0)),
                (Role::Step, _) => slot.place(name),
                (Role::Activations, _) => slot.place(name).or_else(|| Some((self.workspace.get(name)?, 0))),
            };
            found.ok_or_else(|| missing(name))
        };
        let dispatch = |(dispatch, waits_for): (&lily_gpu::plan::Dispatch, &Vec<usize>)| {
            // Buffers in their order, then all numbers together (kernels/README.md).
            let mut arguments = Vec::with_capacity(dispatch.args.len());
            let mut values = Vec::new();
            for arg in &dispatch.args {
                match *arg {
                    Arg::Buffer(id, offset) => {
                        let (buffer, start) = place(id)?;
                        arguments.push(Argument::Buffer {
                            buffer: buffer.clone(),
                            offset: start + offset as usize,
                        });
                    }
                    Arg::Value(value) => values.extend(value.to_le_bytes()),
                }
            }
            if !values.is_empty() {
                arguments.push(Argument::Bytes(values));
            }
            let touch = |access: &lily_gpu::plan::Access| {
                let (buffer, start) = place(access.buffer)?;
                // A table of pages is as long as the context that the backend was built for.
                let at = |place: u64| (start + place as usize).min(buffer.bytes());
                let range = at(access.range.start)..at(access.range.end);
                let (reads, writes) = (access.mode.reads(), access.mode.writes());
                Ok(Touch { buffer: buffer.clone(), range, reads, writes })
            };
            let (mut touches, mut accesses) = (Vec::new(), Vec::new());
            for access in &dispatch.accesses {
                match PoolAccess::of(access, &plan.buffers[access.buffer.0], &self.geometry) {
                    Some(access) if accesses.contains(&access) => {}
                    Some(access) => accesses.push(access),
                    None => touches.push(touch(access)?),
                }
            }
            let always = touches.len();
            let layer = dispatch.layer.map_or_else(String::new, |layer| format!(" of layer {layer}"));
            let memory = dispatch.shared_bytes.next_multiple_of(16);
            let kernel = dispatch.kernel;
            let tensors = self.tensor_pipelines.get(kernel).filter(|_| with_tensors.include(dispatch.stage));
            let dispatch = Dispatch {
                label: format!("{kernel}{layer}"),
                pipeline: tensors.unwrap_or_else(|| &self.pipelines[kernel]).clone(),
                arguments,
                threadgroup_memory: (memory > 0).then_some(memory).into_iter().collect(),
                grid: dispatch.grid,
                threads: dispatch.threads,
                waits_for: waits_for.clone(),
                touches,
            };
            Ok((dispatch, (always, accesses)))
        };
        let dispatches = plan.dispatches.iter().zip(&plan.dependencies.waits_for).map(dispatch);
        let (dispatches, pool_accesses) =
            dispatches.collect::<Result<Vec<_>, DeviceError>>()?.into_iter().unzip();
        Ok(Recorded { dispatches, pool_accesses })
    }
}

/// The pipelines with tensors of all products that may take them in passes with `plans`. None where the device has no
/// faster ones, and none, with a word in the log, where it cannot be trusted with them.
fn tensor_pipelines<D: Device>(
    device: &D,
    geometry: &Geometry,
    sources: &[(Stage, Source)],
    plans: &[(Shape, Plan)],
) -> Result<Pipelines<D>, MetalError> {
    let mut products = HashMap::new();
    for (shape, plan) in plans {
        let taken = Products::of_prompt(device.info(), geometry, shape.rows, shape.rows);
        let products_of = |dispatch: &&lily_gpu::plan::Dispatch| {
            taken.include(dispatch.stage) && metal::kernel_rows(dispatch.kernel) == Some(tensors::BLOCK_ROWS)
        };
        let of_plan = plan.dispatches.iter().filter(products_of);
        products.extend(of_plan.map(|dispatch| (dispatch.kernel, dispatch)));
    }
    if products.is_empty() {
        return Ok(HashMap::new());
    }
    let made = if tensors::agree(device, &sources::products_check(geometry))? {
        with_tensors(device, sources, &products)
    } else {
        let reason = "tensors do not multiply as this GPU's other units do".to_owned();
        Err(DeviceError::Failed { pass: "products_check".to_owned(), reason })
    };
    made.or_else(|reason| {
        tracing::warn!(%reason, "prompts go without this GPU's tensors, which is slower");
        Ok(HashMap::new())
    })
}

/// `products` by name, their stages' `sources` compiled with tensors.
fn with_tensors<D: Device>(
    device: &D,
    sources: &[(Stage, Source)],
    products: &HashMap<&'static str, &lily_gpu::plan::Dispatch>,
) -> Result<Pipelines<D>, DeviceError> {
    let uses = |(stage, _): &&(Stage, Source)| products.values().any(|dispatch| dispatch.stage == *stage);
    let sources = sources.iter().filter(uses);
    let sources: Vec<_> = sources.map(|(stage, source)| (*stage, source.clone().with_tensors())).collect();
    let libraries = compile(device, &sources)?;
    let pipeline = |(&kernel, &dispatch): (&&'static str, &&lily_gpu::plan::Dispatch)| {
        let library = libraries.iter().find(|(stage, _)| *stage == dispatch.stage);
        let (_, library) = library.ok_or_else(|| missing(kernel))?;
        let pipeline = device.tensor_pipeline(library, kernel, dispatch.threads)?;
        let refused = |reason| DeviceError::Kernel { kernel: kernel.to_owned(), reason };
        check(device.info(), &pipeline, dispatch).map_err(refused)?;
        Ok((kernel, pipeline))
    };
    products.iter().map(pipeline).collect()
}

/// A library for each stage, compiled side by side.
fn compile<D: Device>(
    device: &D,
    sources: &[(Stage, Source)],
) -> Result<Vec<(Stage, D::Library)>, DeviceError> {
    thread::scope(|scope| {
        let compilers: Vec<_> = sources
            .iter()
            .map(|(stage, source)| (*stage, scope.spawn(move || device.compile(source))))
            .collect();
        let finished = |(stage, compiler): (Stage, thread::ScopedJoinHandle<'_, _>)| {
            Ok((stage, compiler.join().expect("a compiler does not panic")?))
        };
        compilers.into_iter().map(finished).collect()
    })
}

/// A kernel, from the file of its stage or else from whichever has it.
fn pipeline<D: Device>(
    device: &D,
    libraries: &[(Stage, D::Library)],
    kernel: &str,
    stage: Stage,
) -> Result<D::Pipeline, DeviceError> {
    let own = libraries.iter().filter(|(known, _)| *known == stage);
    let others = libraries.iter().filter(|(known, _)| *known != stage);
    let mut first = Err(missing(kernel));
    for (_, library) in own.chain(others) {
        match device.pipeline(library, kernel) {
            Ok(pipeline) => return Ok(pipeline),
            Err(error) => first = first.or(Err(error)),
        }
    }
    first
}

/// Refuses a kernel that cannot run with as many threads, or as much memory, as its plan says.
fn check<P: Pipeline>(
    info: &DeviceInfo,
    pipeline: &P,
    dispatch: &lily_gpu::plan::Dispatch,
) -> Result<(), String> {
    let (kernel, threads) = (dispatch.kernel, dispatch.threads);
    let most = pipeline.max_threads();
    let memory = dispatch.shared_bytes.saturating_add(pipeline.threadgroup_memory());
    if threads > most {
        return Err(format!(
            "{kernel} runs with at most {most} threads on this GPU and its plan has {threads}"
        ));
    }
    if memory > info.threadgroup_memory {
        let has = info.threadgroup_memory;
        return Err(format!("{kernel} needs {memory} bytes of threadgroup memory and this GPU has {has}"));
    }
    Ok(())
}

fn missing(name: &str) -> DeviceError {
    let reason = "a plan names it, and nobody has it; please report this".to_owned();
    DeviceError::Kernel { kernel: name.to_owned(), reason }
}
