//! A recorded pass: buffers, and dispatches that say which bytes they touch.
//!
//! A [`Recorder`] takes dispatches in the order of the program and gives a [`Plan`], whose dependencies follow
//! from the ranges ([`crate::dependencies`]).
//!
//! # Bound and reached
//!
//! A kernel gets most buffers as arguments, in the order in which they are recorded. Some memory it only
//! reaches through another buffer: pages and recurrent states belong to sequences, which come and go between
//! launches of the same plan, so their addresses stand in the step block. Such accesses have ranges like all
//! others and no argument; on a device without addresses the argument is the pool that the memory is part of, and
//! the ranges still count what the sequences of the step have, not where it lies in the pool.
//!
//! # Range and traffic
//!
//! A range is what an access may touch, and orders dispatches. Traffic is what it moves: usually the range's
//! length, but of a stack of experts a token reads only some. Every byte counts once for a dispatch, however many blocks
//! read it: the first has it from memory, the others from the device's cache.

use std::ops::Range;

use crate::dependencies::{self, Dependencies};
use crate::stage::Stage;
use crate::target::Launch;

/// A buffer of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub usize);

/// What a buffer holds, which decides who allocates it and how its traffic is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Weights: never written.
    Weights,
    /// What the host says about a step: tokens, positions, addresses of pages and states.
    Step,
    /// Recurrent states and convolution tails of the sequences in the batch.
    State,
    /// Keys and values of the sequences in the batch.
    Kv,
    /// What stages hand to each other.
    Activations,
}

impl Role {
    /// All of them.
    pub const ALL: [Role; 5] = [Role::Weights, Role::Step, Role::State, Role::Kv, Role::Activations];
}

/// Memory that dispatches share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// A name for people, unique in the plan.
    pub name: String,
    /// What it holds.
    pub role: Role,
    /// Its size.
    pub bytes: u64,
}

/// Whether an access changes what it touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It only reads.
    Read,
    /// It only writes.
    Write,
    /// It reads, then writes.
    Update,
}

impl Mode {
    /// Whether bytes change.
    pub fn writes(self) -> bool {
        self != Mode::Read
    }

    /// Whether bytes are looked at.
    pub fn reads(self) -> bool {
        self != Mode::Write
    }
}

/// Bytes of a buffer that a dispatch touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The buffer.
    pub buffer: BufferId,
    /// What may be touched, in bytes from the buffer's start.
    pub range: Range<u64>,
    /// How.
    pub mode: Mode,
    /// Bytes that are moved, in each direction that [`Access::mode`] has.
    pub traffic: u64,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// The address of a buffer, so many bytes after its start.
    Buffer(BufferId, u64),
    /// A number.
    Value(u32),
}

/// One launch of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dispatch {
    /// The kernel's name in its source.
    pub kernel: &'static str,
    /// The stage that it is part of, which is also the name of its source file.
    pub stage: Stage,
    /// The layer that it works for.
    pub layer: Option<usize>,
    /// Blocks (threadgroups) along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of on-chip memory that a block gets beside what the kernel declares.
    pub shared_bytes: u32,
    /// Arguments, in order.
    pub args: Vec<Arg>,
    /// All that it touches.
    pub accesses: Vec<Access>,
}

/// A recorded pass and the order that its ranges ask for.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Indexed by [`BufferId`].
    pub buffers: Vec<Buffer>,
    /// In the order of recording, which is one that keeps all dependencies.
    pub dispatches: Vec<Dispatch>,
    /// Which dispatch waits for which.
    pub dependencies: Dependencies,
}

/// Takes down a pass.
#[derive(Debug, Default)]
pub struct Recorder {
    buffers: Vec<Buffer>,
    dispatches: Vec<Dispatch>,
}

impl Recorder {
    /// An empty recording.
    pub fn new() -> Recorder {
        Recorder::default()
    }

    /// A new buffer.
    pub fn buffer(&mut self, name: impl Into<String>, role: Role, bytes: u64) -> BufferId {
        self.buffers.push(Buffer { name: name.into(), role, bytes });
        BufferId(self.buffers.len() - 1)
    }

    /// Size of a buffer.
    pub fn bytes(&self, buffer: BufferId) -> u64 {
        self.buffers[buffer.0].bytes
    }

    /// A dispatch of `kernel` with one block of one thread and nothing bound; the rest is said with the methods
    /// of what comes back, and it is recorded by [`Recording::end`].
    pub fn dispatch(&mut self, kernel: &'static str, stage: Stage, layer: Option<usize>) -> Recording<'_> {
        let dispatch = Dispatch {
            kernel,
            stage,
            layer,
            grid: [1; 3],
            threads: 1,
            shared_bytes: 0,
            args: Vec::new(),
            accesses: Vec::new(),
        };
        Recording { recorder: self, dispatch }
    }

    /// The plan of what was recorded.
    pub fn finish(self) -> Plan {
        let dependencies = dependencies::derive(&self.dispatches);
        Plan { buffers: self.buffers, dispatches: self.dispatches, dependencies }
    }
}

/// A dispatch that is being described.
#[derive(Debug)]
#[must_use = "a dispatch is recorded by `end`"]
pub struct Recording<'a> {
    recorder: &'a mut Recorder,
    dispatch: Dispatch,
}

impl Recording<'_> {
    /// Blocks, threads and on-chip memory.
    pub fn launch(mut self, launch: Launch) -> Self {
        self.dispatch.grid = launch.grid;
        self.dispatch.threads = launch.threads;
        self.dispatch.shared_bytes = launch.shared_bytes;
        self
    }

    /// Binds all of `buffer`, which is read.
    pub fn reads(self, buffer: BufferId) -> Self {
        let range = self.whole(buffer);
        let traffic = range.end;
        self.bind(buffer, range, Mode::Read, traffic)
    }

    /// Binds all of `buffer`, of which any part may be read, `traffic` bytes in all.
    pub fn reads_some(self, buffer: BufferId, traffic: u64) -> Self {
        let range = self.whole(buffer);
        self.bind(buffer, range, Mode::Read, traffic)
    }

    /// Binds `buffer`, whose first `bytes` are read.
    pub fn reads_first(self, buffer: BufferId, bytes: u64) -> Self {
        self.bind(buffer, 0..bytes, Mode::Read, bytes)
    }

    /// Binds `buffer`, whose first `bytes` are written.
    pub fn writes_first(self, buffer: BufferId, bytes: u64) -> Self {
        self.bind(buffer, 0..bytes, Mode::Write, bytes)
    }

    /// Binds all of `buffer`, any part of which may be written, `traffic` bytes in all.
    pub fn writes_some(self, buffer: BufferId, traffic: u64) -> Self {
        let range = self.whole(buffer);
        self.bind(buffer, range, Mode::Write, traffic)
    }

    /// Binds all of `buffer`, which is written.
    pub fn writes(self, buffer: BufferId) -> Self {
        let range = self.whole(buffer);
        let traffic = range.end;
        self.bind(buffer, range, Mode::Write, traffic)
    }

    /// Binds all of `buffer`, which is read and written.
    pub fn updates(self, buffer: BufferId) -> Self {
        let range = self.whole(buffer);
        let traffic = range.end;
        self.bind(buffer, range, Mode::Update, traffic)
    }

    /// Binds `buffer` at the start of `range`.
    pub fn bind(mut self, buffer: BufferId, range: Range<u64>, mode: Mode, traffic: u64) -> Self {
        self.dispatch.args.push(Arg::Buffer(buffer, range.start));
        self.reach(buffer, range, mode, traffic)
    }

    /// Binds `buffer`, which is not touched: the device is only told that it is read soon.
    pub fn mentions(mut self, buffer: BufferId) -> Self {
        self.dispatch.args.push(Arg::Buffer(buffer, 0));
        self
    }

    /// Binds memory of which [`Recording::reach`] says what is touched.
    pub fn pool(self, buffer: BufferId) -> Self {
        self.mentions(buffer)
    }

    /// Goes on with `more` where there is something to go on with.
    pub fn when<T>(self, some: Option<T>, more: impl FnOnce(Self, T) -> Self) -> Self {
        match some {
            Some(some) => more(self, some),
            None => self,
        }
    }

    /// Touches `range` of `buffer` without having it as an argument.
    pub fn reach(mut self, buffer: BufferId, range: Range<u64>, mode: Mode, traffic: u64) -> Self {
        debug_assert!(range.start <= range.end && range.end <= self.recorder.bytes(buffer));
        self.dispatch.accesses.push(Access { buffer, range, mode, traffic });
        self
    }

    /// Passes a number.
    pub fn value(mut self, value: u32) -> Self {
        self.dispatch.args.push(Arg::Value(value));
        self
    }

    /// Records the dispatch.
    pub fn end(self) {
        self.recorder.dispatches.push(self.dispatch);
    }

    fn whole(&self, buffer: BufferId) -> Range<u64> {
        0..self.recorder.bytes(buffer)
    }
}
