//! The handle through which everything above talks to the one thread that owns the device.
//!
//! [`Engine::start`] moves a [`Backend`] into a thread of its own; [`Engine::submit`] checks a [`Request`],
//! queues it and returns a [`Generation`] that yields [`Event`]s. What the thread does with the queue is the
//! `scheduler` module's subject. The handle is cheap to clone; when the last clone goes, requests that were
//! taken are finished and the thread ends.

mod active;
mod admission;
mod device;
mod generation;
mod queue;
mod request;
mod scheduler;
mod spill;
mod stats;
mod steering;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lily_model::tokenizer::Tokenizer;

use crate::backend::{Backend, PrefillChunks};
use crate::constraint::Grammars;
use crate::prefix_cache::disk::DiskOptions;
use crate::prefix_cache::positions::{EVERY, TurnMarkers};
use crate::stop::StopMatcher;
use queue::{Job, Queue};
use scheduler::Scheduler;
use steering::Steering;

pub use generation::{Event, FinishReason, Generation, Timings, Usage};
pub use queue::Load;
pub use request::{Request, SubmitError};
pub use stats::Stats;

/// How an engine runs, whatever the request.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Tokens of a prompt per prefill call while nobody waits for a next token; `None` takes what the backend is best
    /// given ([`Backend::prefill_chunks`]). 0 counts as 1.
    pub prefill_chunk: Option<usize>,
    /// The same while streams run: between two tokens of a stream lies at most one such call.
    pub busy_chunk: Option<usize>,
    /// Requests that are worked on at once. 0 counts as 1.
    pub max_running: usize,
    /// Requests that may wait beyond those; more are refused with [`SubmitError::Busy`].
    pub max_waiting: usize,
    /// Enqueue step n+1 before token n is collected, where no sequence needs the host to choose. Backends that
    /// return from an enqueue before the work is done ([`Backend::runs_ahead`]) turn it on; one that computes
    /// inside the call would only deliver every token a step late.
    pub pipeline: bool,
    /// How long after it failed, and after each attempt since, an idle device is tried with one token: whoever
    /// watches over the server sends it no requests while the device fails, so none would find out that it works.
    pub retry_device: Duration,
    /// What is kept of earlier requests.
    pub cache: CacheOptions,
}

/// What the prefix cache keeps, and where.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheOptions {
    /// Bytes that its snapshots may hold in the backend; 0 turns it off.
    pub bytes: u64,
    /// How the turns of a chat prompt are told apart; `None` where prompts are plain text.
    pub markers: Option<TurnMarkers>,
    /// Tokens between the snapshots of a long prompt: see [`positions::EVERY`](crate::prefix_cache::positions::EVERY).
    pub every: usize,
    /// A second place for some of them, which outlives the process.
    pub disk: Option<DiskOptions>,
}

impl Default for CacheOptions {
    /// Turned off.
    fn default() -> CacheOptions {
        CacheOptions { bytes: 0, markers: None, every: EVERY, disk: None }
    }
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            eos_token_ids: Vec::new(),
            prefill_chunk: None,
            busy_chunk: None,
            max_running: 8,
            max_waiting: 64,
            pipeline: false,
            retry_device: Duration::from_secs(5),
            cache: CacheOptions::default(),
        }
    }
}

/// A running engine. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct Engine {
    handle: Arc<Handle>,
}

/// What all clones share; its end is the end of submissions.
#[derive(Debug)]
struct Handle {
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
    tokenizer: Tokenizer,
    grammars: Grammars,
    vocab: usize,
    context_limit: usize,
    /// Tokens of the longest sequence that memory holds, at most the context.
    fits: usize,
    memory_limit: u64,
    description: String,
    /// Tokens of a prompt per prefill call where a request does not say.
    chunk: usize,
    options: EngineOptions,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.queue.close("every handle to it was dropped");
    }
}

impl Engine {
    /// Moves `backend` into a thread of its own. `tokenizer` turns its tokens into text. Should the system
    /// refuse a thread, the engine refuses requests and says why.
    pub fn start(backend: Box<dyn Backend>, tokenizer: Tokenizer, options: EngineOptions) -> Engine {
        let options = EngineOptions {
            max_running: options.max_running.max(1),
            pipeline: options.pipeline || backend.runs_ahead(),
            ..options
        };
        let best = backend.prefill_chunks();
        let chunks = PrefillChunks {
            alone: options.prefill_chunk.unwrap_or(best.alone).max(1),
            busy: options.busy_chunk.unwrap_or(best.busy).max(1),
        };
        let queue = Arc::new(Queue::new(options.max_running, options.max_waiting));
        let vocab = backend.geometry().vocab;
        let context_limit = backend.context_limit();
        let fits = tokens_that_fit(&*backend);
        let memory_limit = backend.memory().limit;
        let description = backend.description();
        let thread = {
            let queue = Arc::clone(&queue);
            let (tokenizer, options) = (tokenizer.clone(), options.clone());
            std::thread::Builder::new()
                .name("lily-engine".to_owned())
                .spawn(move || work(Scheduler::new(backend, tokenizer, options, chunks.busy, queue)))
        };
        let thread = match thread {
            Ok(thread) => Some(thread),
            Err(error) => {
                queue.stop(&format!("the system refused it a thread ({error})"));
                None
            }
        };
        let thread = Mutex::new(thread);
        let grammars = Grammars::new(tokenizer.clone(), vocab, &options.eos_token_ids);
        Engine {
            handle: Arc::new(Handle {
                queue,
                thread,
                tokenizer,
                grammars,
                vocab,
                context_limit,
                fits,
                memory_limit,
                description,
                chunk: chunks.alone,
                options,
            }),
        }
    }

    /// Takes a request, or says at once why not. Compiling a constraint can take a moment: in an async runtime
    /// call it where blocking is allowed.
    pub fn submit(&self, request: Request) -> Result<Generation, SubmitError> {
        let handle = &*self.handle;
        let Request {
            prompt,
            sampling,
            max_tokens,
            stop,
            ignore_eos,
            constraint,
            thinking_budget,
            prefill_chunk,
        } = request;
        if prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if prompt.len() >= handle.context_limit {
            return Err(SubmitError::PromptTooLong { prompt: prompt.len(), limit: handle.context_limit });
        }
        if prompt.len() >= handle.fits {
            return Err(SubmitError::NeverFits {
                prompt: prompt.len(),
                fits: handle.fits,
                memory: handle.memory_limit,
            });
        }
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= handle.vocab) {
            return Err(SubmitError::BadToken { token, vocab: handle.vocab });
        }
        for (field, value) in [("max_tokens", max_tokens), ("prefill_chunk", prefill_chunk)] {
            if value == Some(0) {
                return Err(SubmitError::Zero { field });
            }
        }
        sampling.validate(handle.vocab)?;
        let stops = StopMatcher::new(stop)?;
        let guide = constraint.map(|constraint| handle.grammars.compile(&constraint)).transpose()?;
        let eos = &handle.options.eos_token_ids;
        let steering = Steering::new(&handle.tokenizer, eos, &prompt, thinking_budget, guide);

        let room = handle.fits - prompt.len();
        let (events, generation) = generation::channel();
        handle.queue.submit(Job {
            max_tokens: max_tokens.unwrap_or(room).min(room),
            chunk: prefill_chunk.unwrap_or(handle.chunk),
            prompt,
            sampling,
            stops,
            ignore_eos,
            steering,
            events,
            submitted: Instant::now(),
        })?;
        Ok(generation)
    }

    /// How much there is to do.
    pub fn load(&self) -> Load {
        self.handle.queue.load()
    }

    /// What it has done and what it holds, as of its last iteration.
    pub fn stats(&self) -> Stats {
        self.handle.queue.stats()
    }

    /// Why the engine no longer takes requests, if it does not.
    pub fn stopped(&self) -> Option<String> {
        self.handle.queue.stopped()
    }

    /// How the device failed at last, unless it has worked since: requests are taken, and likely to fail.
    pub fn trouble(&self) -> Option<String> {
        self.handle.queue.trouble()
    }

    /// The tokenizer that the engine was started with.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.handle.tokenizer
    }

    /// Tokens that prompt and answer may hold together.
    pub fn context_limit(&self) -> usize {
        self.handle.context_limit
    }

    /// Size of the model's vocabulary: every token id is below it.
    pub fn vocab(&self) -> usize {
        self.handle.vocab
    }

    /// One line for people: the backend's [`Backend::description`].
    pub fn description(&self) -> &str {
        &self.handle.description
    }

    /// The options that it runs with.
    pub fn options(&self) -> &EngineOptions {
        &self.handle.options
    }

    /// Takes no more requests, lets those taken finish for at most `grace`, fails what is left, and returns
    /// when the thread has ended. It blocks: in an async runtime call it where blocking is allowed.
    pub fn shutdown(&self, grace: Duration) {
        let handle = &*self.handle;
        handle.queue.close("it was shut down");
        if !handle.queue.wait_until_stopped(grace) {
            handle.queue.abort();
        }
        let thread = handle.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The thread catches its own panics and has told every request; there is nothing to add here.
            let _ = thread.join();
        }
    }
}

/// Tokens of the longest sequence that `backend` has memory for, at most its context. Beside the sequence there
/// must be room for the snapshot that it began from, and a page for the copy of a shared one.
fn tokens_that_fit(backend: &dyn Backend) -> usize {
    let room = backend.memory().limit.saturating_sub(backend.sequence_bytes(1));
    let (mut fits, mut too_many) = (0, backend.context_limit().saturating_add(1));
    while too_many - fits > 1 {
        let middle = fits + (too_many - fits) / 2;
        if backend.sequence_bytes(middle) <= room { fits = middle } else { too_many = middle }
    }
    fits
}

/// The thread's whole life. A panic becomes [`Event::Failed`] for everything that was taken.
fn work(mut scheduler: Scheduler) {
    let panic = catch_unwind(AssertUnwindSafe(|| scheduler.run())).err();
    let reason = panic.map(|panic| {
        format!("its thread panicked ({}); restart it, and please report this", device::message(&*panic))
    });
    scheduler.stop(reason.as_deref());
}
