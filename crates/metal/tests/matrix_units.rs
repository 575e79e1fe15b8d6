//! Passes of prompts with many rows are multiplied with Metal 4's tensors where a GPU has fast ones that are right, and give the bits
//! that they give without.
#![cfg(target_os = "linux")]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use lily_engine::backend::{Backend, Want};
use lily_gpu::memory::Context;
use lily_metal::device::{Argument, Device, DeviceInfo, Dispatch, Pass, Source, Touch, Transfer};
use lily_metal::emulator::{Emulator, Options};
use lily_metal::error::DeviceError;
use lily_metal::{MetalBackend, MetalOptions};
use lily_model::checkpoint::Checkpoint;
use lily_model::geometry::LayerKind;
use lily_model::synth;
use lily_model::weights::{Blob, Weights};

/// Fewest rows that go through tensors, and the most that do not.
const MANY: usize = 400;
const FEW: usize = MANY - 1;
/// The most tokens of a sequence here.
const CONTEXT: usize = 448;
/// The products of a pass.
const PRODUCTS: [&str; 7] = [
    "attn_in_prefill_64",
    "attn_out_prefill_64",
    "delta_in_prefill_64",
    "delta_out_prefill_64",
    "moe_down_prefill_64",
    "moe_route_prefill_64",
    "moe_up_prefill_64",
];
const CHECKS: [&str; 2] = ["products_check_4", "products_check_8"];

type Memory = <Emulator as Device>::Buffer;

/// What is wrong with a GPU's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// They multiply otherwise than the GPU's other units.
    Bits,
    /// The compiler refuses a stage with them.
    Compiler,
}

/// What was made and run with tensors, by name.
#[derive(Debug, Default)]
struct Seen {
    compiled: BTreeSet<String>,
    made: BTreeSet<String>,
    /// In passes since [`Watched::ran`] was asked, the checks' aside.
    ran: BTreeSet<String>,
}

/// An emulated GPU that notes what it does with tensors.
#[derive(Clone, Debug)]
struct Watched {
    gpu: Emulator,
    wrong: Wrong,
    seen: Arc<Mutex<Seen>>,
}

impl Watched {
    fn new(gpu: Result<Emulator, DeviceError>, wrong: Wrong) -> Watched {
        Watched { gpu: gpu.unwrap(), wrong, seen: Arc::default() }
    }

    fn seen<T>(&self, of: impl FnOnce(&mut Seen) -> T) -> T {
        of(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Kernels with tensors in the passes since this was asked last.
    fn ran(&self) -> Vec<String> {
        self.seen(|seen| std::mem::take(&mut seen.ran)).into_iter().collect()
    }
}

impl Device for Watched {
    type Library = <Emulator as Device>::Library;
    type Pipeline = <Emulator as Device>::Pipeline;
    type Buffer = Memory;
    type Completion = <Emulator as Device>::Completion;

    fn info(&self) -> &DeviceInfo {
        self.gpu.info()
    }

    fn allocated(&self) -> u64 {
        self.gpu.allocated()
    }

    fn compile(&self, source: &Source) -> Result<Self::Library, DeviceError> {
        if !source.has_tensors() {
            return self.gpu.compile(source);
        }
        self.seen(|seen| seen.compiled.insert(source.name.clone()));
        match self.wrong {
            Wrong::Compiler if source.name == "attn_out.metal" => {
                let log = "not today".to_owned();
                Err(DeviceError::Compile { source_name: source.name.clone(), log })
            }
            Wrong::Bits => {
                let (right, wrong) =
                    ("totals[i], sums[i], staged", "totals[i], float(half(sums[i])), staged");
                assert!(source.text.contains(right));
                let text = source.text.replace(right, wrong);
                self.gpu.compile(&Source { text, ..source.clone() })
            }
            _ => self.gpu.compile(source),
        }
    }

    fn pipeline(&self, library: &Self::Library, name: &str) -> Result<Self::Pipeline, DeviceError> {
        self.gpu.pipeline(library, name)
    }

    fn tensor_pipeline(
        &self,
        library: &Self::Library,
        name: &str,
        threads: u32,
    ) -> Result<Self::Pipeline, DeviceError> {
        self.seen(|seen| seen.made.insert(name.to_owned()));
        self.gpu.tensor_pipeline(library, name, threads)
    }

    fn allocate(&self, label: &str, bytes: usize) -> Result<Memory, DeviceError> {
        self.gpu.allocate(label, bytes)
    }

    fn map(&self, label: &str, bytes: &Blob) -> Result<Memory, DeviceError> {
        self.gpu.map(label, bytes)
    }

    fn submit(&self, pass: &Pass<'_, Watched>) -> Result<Self::Completion, DeviceError> {
        let dispatch = |dispatch: &Dispatch<Watched>| {
            let Dispatch { label, pipeline, threadgroup_memory, grid, threads, waits_for, .. } =
                dispatch.clone();
            if pipeline.has_tensors() && label != "products_check" {
                let kernel = label.split(' ').next().unwrap_or(&label).to_owned();
                self.seen(|seen| seen.ran.insert(kernel));
            }
            let arguments: Vec<Argument<Memory>> = dispatch.arguments.clone();
            let touches: Vec<Touch<Memory>> = dispatch.touches.clone();
            Dispatch { label, pipeline, arguments, threadgroup_memory, grid, threads, waits_for, touches }
        };
        let dispatches: Vec<Dispatch<Emulator>> = pass.dispatches.iter().map(dispatch).collect();
        let (before, after): (&[Transfer<Memory>], &[Transfer<Memory>]) = (pass.before, pass.after);
        self.gpu.submit(&Pass { label: pass.label, before, dispatches: &dispatches, after })
    }
}

const OPTIONS: Options = Options { seed: 1, tracked: false };

/// Two layers, the smallest that the kernels take; every token goes to all eight experts.
fn weights() -> (Weights, tempfile::TempDir) {
    let mut geometry = Checkpoint::demo().unwrap().geometry().clone();
    geometry.layers = vec![LayerKind::Delta, LayerKind::Attention];
    geometry.moe.experts = geometry.moe.top_k;
    let dir = tempfile::tempdir().unwrap();
    synth::write(dir.path(), &geometry, 1, &|_, _| {}).unwrap();
    (Checkpoint::open(dir.path()).and_then(|random| random.weights()).unwrap(), dir)
}

fn open(device: &Watched, weights: &Weights) -> MetalBackend<Watched> {
    let options = MetalOptions { context: Context::Exactly(CONTEXT), ..MetalOptions::default() };
    MetalBackend::new(device, weights, &options).unwrap()
}

/// The bits of the logits behind `count` tokens that are read in one pass, and of those behind one more.
fn logits(backend: &mut MetalBackend<Watched>, count: usize) -> Vec<u32> {
    let tokens: Vec<u32> = (0..=count as u32).map(|i| (i * 7919 + 13) % 4000).collect();
    let sequence = backend.open(None).unwrap();
    let mut bits = Vec::new();
    for part in [&tokens[..count], &tokens[count..]] {
        let ticket = backend.extend(sequence, part, Want::Logits).unwrap();
        let output = backend.collect(ticket).unwrap().pop().unwrap();
        bits.extend(output.logits.iter().map(|logit| logit.to_bits()));
    }
    backend.close(sequence);
    bits
}

#[test]
fn passes_of_many_rows_go_through_tensors_and_give_the_same_bits() {
    let (weights, _dir) = weights();
    let (with, without) = (
        Watched::new(Emulator::with_tensors(OPTIONS), Wrong::Nothing),
        Watched::new(Emulator::new(OPTIONS), Wrong::Nothing),
    );
    let (mut faster, mut plain) = (open(&with, &weights), open(&without, &weights));
    let expected = logits(&mut plain, MANY);
    assert!(expected.iter().any(|&bits| bits != expected[0]));
    assert!(logits(&mut faster, MANY) == expected);
    assert_eq!(with.ran(), PRODUCTS);
    // The same plan.
    logits(&mut faster, FEW);
    assert!(with.ran().is_empty());
    without.seen(|seen| assert!(seen.compiled.is_empty() && seen.ran.is_empty()));
    with.seen(|seen| {
        let made: Vec<_> = seen.made.iter().filter(|name| !CHECKS.contains(&name.as_str())).collect();
        assert_eq!(made, PRODUCTS);
    });
}

#[test]
fn a_gpu_whose_tensors_are_wrong_or_do_not_compile_goes_without_them() {
    let (weights, _dir) = weights();
    for wrong in [Wrong::Bits, Wrong::Compiler] {
        let device = Watched::new(Emulator::with_tensors(OPTIONS), wrong);
        open(&device, &weights);
        // What was not made cannot run.
        device.seen(|seen| {
            assert!(seen.compiled.contains("products_check.metal"), "{wrong:?}");
            assert_eq!(seen.compiled.contains("attn_out.metal"), wrong == Wrong::Compiler);
            assert!(seen.made.iter().all(|name| CHECKS.contains(&name.as_str())), "{wrong:?}");
        });
    }
}
