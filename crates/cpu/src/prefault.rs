//! The weights' pages, entered by a thread of its own while the first requests are already answered.
//!
//! See [`lily_model::populate`] for what it saves. Weights that are in the page cache take a tenth of a second to a
//! second; others are read from the disk from front to back, which is also the fastest way for whoever waits for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use lily_model::populate::populate;
use lily_model::weights::{Blob, Matrix, Mixer, Weights};

use crate::limits::free_bytes;

/// Memory that must be left beside the weights, as a part of them: where it is scarcer, pages that were entered push out
/// others that are needed.
const MARGIN: usize = 16;
/// Bytes between two looks at whether to stop.
const STEP: usize = 64 << 20;

/// The thread; dropping this ends it.
pub struct Prefault {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Prefault {
    /// Starts to enter the pages of `weights`, if memory has room for all of them: where it has not, each page
    /// would push out another. Pages of files that are in memory already count as room.
    pub fn start(weights: &Weights) -> Prefault {
        let stop = Arc::new(AtomicBool::new(false));
        let regions = regions(weights);
        let bytes: usize = regions.iter().map(|region| region.len()).sum();
        let thread = free_bytes().is_some_and(|free| bytes + bytes / MARGIN <= free).then(|| {
            let stop = stop.clone();
            let work = move || {
                let steps = regions.iter().flat_map(|region| region.chunks(STEP));
                steps.take_while(|_| !stop.load(Ordering::Relaxed)).for_each(populate);
            };
            // Without the thread pages are entered when they are read.
            thread::Builder::new().name("lily-prefault".into()).spawn(work).ok()
        });
        Prefault { stop, thread: thread.flatten() }
    }
}

impl Drop for Prefault {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It does nothing that could panic, and its work is not missed.
            let _ = thread.join();
        }
    }
}

/// What the passes read of mapped files, in the order in which they read it.
fn regions(weights: &Weights) -> Vec<Blob> {
    let mut regions = Vec::new();
    let mut add = |matrices: &[&Matrix]| {
        for matrix in matrices {
            regions.extend([&matrix.data, &matrix.scales, &matrix.biases].map(Blob::clone));
        }
    };
    add(&[&weights.embed_tokens]);
    for layer in &weights.layers {
        match &layer.mixer {
            Mixer::Delta(w) => {
                add(&[&w.in_proj_qkv, &w.in_proj_z, &w.in_proj_b, &w.in_proj_a, &w.out_proj]);
            }
            Mixer::Attention(w) => add(&[&w.q_proj, &w.k_proj, &w.v_proj, &w.o_proj]),
        }
        let moe = &layer.moe;
        add(&[&moe.gate, &moe.gate_proj, &moe.up_proj, &moe.down_proj]);
        add(&[&moe.shared_expert_gate, &moe.shared_gate_proj, &moe.shared_up_proj, &moe.shared_down_proj]);
    }
    add(&[&weights.lm_head]);
    regions
}
