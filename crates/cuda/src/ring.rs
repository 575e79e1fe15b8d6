//! Decode steps that the card repeats by itself.
//!
//! While the same sequences go on from the tokens that the card chose, nothing of a step is new to it: its last
//! kernel moves the positions on in the step block, its first counts the **turn**, and the chosen tokens go straight
//! into a ring in the host's memory, each with its turn in one write of eight bytes. Such a step is the launch of a
//! graph and nothing else: a copy to or from the card would stand between two graphs as long as four stages.

use std::sync::Arc;

use lily_engine::backend::{BackendError, SequenceId};
use lily_gpu::decode::MAX_ROWS;
use lily_gpu::step::StepLayout;

use crate::driver::{Gpu, Module, Pinned};
use crate::error::CudaError;

/// Turns whose tokens the ring holds: `RING` in `kernels/sample.cu`.
const TURNS: usize = 64;
/// In the step block's turn: the tokens are settled by the kernels that follow the pass.
const DEFERRED: u32 = 1 << 31;
/// Looks at the ring between two at the stream, which would tell of a failure.
const LOOKS: usize = 1 << 12;

/// What the step block on the card says by itself about the next step.
#[derive(Debug, PartialEq, Eq)]
pub struct Rows {
    /// Each row's sequence, and the position of its token.
    pub sequences: Vec<(SequenceId, usize)>,
    /// Whether tokens are settled behind the pass.
    pub deferred: bool,
}

/// The ring, and what is known of the step block.
#[derive(Debug)]
pub struct Ring {
    gpu: Arc<Gpu>,
    tokens: Pinned,
    /// The last turn that was enqueued.
    turn: u32,
    in_flight: usize,
    next: Option<Rows>,
}

impl Ring {
    /// A ring that the kernels of `module`, the stage `sample`, know of.
    pub fn new(gpu: &Arc<Gpu>, module: &Module) -> Result<Ring, CudaError> {
        let tokens = gpu.pinned(TURNS * MAX_ROWS * size_of::<u64>())?;
        gpu.upload_now(module.variable("token_ring")?, &tokens.address().to_le_bytes())?;
        Ok(Ring { gpu: Arc::clone(gpu), tokens, turn: 1, in_flight: 0, next: None })
    }

    /// Whether one more turn may be enqueued before the first is read.
    pub fn has_room(&self) -> bool {
        self.in_flight < TURNS
    }

    /// Whether the step block on the card says `rows` by itself.
    pub fn repeats(&self, rows: &Rows) -> bool {
        self.next.as_ref() == Some(rows)
    }

    /// Writes into a step block that its step is the next turn.
    pub fn write(&self, block: &mut [u8], rows: &Rows) {
        // The pass counts it on before it is used.
        let turn = if rows.deferred { self.turn | DEFERRED } else { self.turn };
        block[StepLayout::TURN..StepLayout::TURN + size_of::<u32>()].copy_from_slice(&turn.to_le_bytes());
    }

    /// Notes that a turn of `rows` was enqueued, and returns it.
    pub fn enqueued(&mut self, mut rows: Rows) -> u32 {
        self.turn = if self.turn == DEFERRED - 1 { 1 } else { self.turn + 1 };
        self.in_flight += 1;
        rows.sequences.iter_mut().for_each(|(_, position)| *position += 1);
        self.next = Some(rows);
        self.turn
    }

    /// Notes that the step block is written anew for something else.
    pub fn forget(&mut self) {
        self.next = None;
    }

    /// Waits for the tokens of a turn of `rows` rows. The wait is short, and a core is given to it.
    pub fn collect(&mut self, turn: u32, rows: usize) -> Result<Vec<u32>, BackendError> {
        self.in_flight -= 1;
        let first = turn as usize % TURNS * MAX_ROWS;
        (first..first + rows).map(|index| self.wait(index, turn)).collect()
    }

    fn wait(&self, index: usize, turn: u32) -> Result<u32, BackendError> {
        let mut idle = false;
        loop {
            for _ in 0..LOOKS {
                let word = self.tokens.watch(index);
                if (word >> u32::BITS) as u32 == turn {
                    return Ok(word as u32);
                }
                std::hint::spin_loop();
            }
            if idle {
                return Err(BackendError::Device("a step ended without its tokens".to_owned()));
            }
            idle = self.gpu.is_idle()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_and_host_have_the_same_ring() {
        let source = include_str!("../kernels/sample.cu");
        assert!(source.contains(&format!("constexpr u32 RING = {TURNS};")));
        assert!(source.contains(&format!("constexpr u32 DEFERRED = {DEFERRED:#x}u;")));
    }
}
