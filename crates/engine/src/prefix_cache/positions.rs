//! Where a prompt is worth a snapshot.
//!
//! A snapshot costs a copy of the recurrent state (66 MB with the full model, as much as the keys and values of
//! 3,200 tokens), so they are taken where the next prompt of a conversation is likely to part from this one:
//!
//! - at the end of the system block with its tools, which every conversation of an agent shares;
//! - at the last user's question and at the answer to it: the chat template takes the reasoning out of every
//!   turn after a question as soon as the next question is asked, so that the next prompt parts from this one
//!   just there, however many tool calls follow;
//! - at the last two turns: the one that the model is about to begin, whose reasoning may not come back, and
//!   the one before, whose text may have been put there for this one request (a reminder, the time);
//! - at every [`EVERY`] tokens, for whatever diverges elsewhere.
//!
//! The older turns of a prompt that comes cold are not snapshotted: each had its snapshots when it was the last
//! one, where this process saw it; and where it did not, going back to one of them costs [`EVERY`] tokens at most.

/// Tokens between the snapshots of a long stretch. At 3,200 tokens a state costs as many bytes as the keys and
/// values that it stands for, so at 4,096 the states of a long prompt are the smaller part of what it takes,
/// and a divergence anywhere costs at most 4,095 tokens again.
pub const EVERY: usize = 4096;

/// Tokens of a turn among which the mark of a tool's result is looked for: `<|im_start|>`, the role and a
/// newline stand before it.
const TURN_HEAD: usize = 6;

/// The tokens by which a chat prompt's turns are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnMarkers {
    /// Begins a turn: `<|im_start|>`.
    pub turn_start: u32,
    /// Begins a tool's result, which the chat template puts into a user's turn: `<tool_response>`.
    pub tool_response: Option<u32>,
}

/// The lengths at which `prompt` is worth a snapshot, ascending, each at least 1 and less than the prompt's.
/// `every` stands for [`EVERY`].
pub fn positions(prompt: &[u32], markers: Option<&TurnMarkers>, every: usize) -> Vec<usize> {
    let mut positions: Vec<usize> =
        (1..).map(|i| i * every.max(1)).take_while(|&p| p < prompt.len()).collect();
    let turns: Vec<usize> = match markers {
        Some(markers) => (0..prompt.len()).filter(|&i| prompt[i] == markers.turn_start).collect(),
        None => Vec::new(),
    };
    match (markers, turns.as_slice()) {
        (Some(markers), &[.., last]) => {
            positions.extend(turns.iter().find(|&&turn| turn > 0));
            positions.extend(turns.iter().rev().take(2));
            if let Some(question) = last_question(prompt, &turns, markers) {
                positions.push(turns[question]);
                positions.push(turns.get(question + 1).copied().unwrap_or(last));
            }
        }
        // Plain text says nothing of itself; at least the same prompt again is cheap.
        _ => positions.push(prompt.len().saturating_sub(1)),
    }
    positions.retain(|&position| 0 < position && position < prompt.len());
    positions.sort_unstable();
    positions.dedup();
    positions
}

/// The last turn that is neither the model's, as the prompt's last turn is, nor a tool's result.
fn last_question(prompt: &[u32], turns: &[usize], markers: &TurnMarkers) -> Option<usize> {
    let model = prompt.get(turns.last()? + 1);
    (0..turns.len()).rev().find(|&index| {
        let end = turns.get(index + 1).copied().unwrap_or(prompt.len());
        let head = &prompt[turns[index]..end.min(turns[index] + TURN_HEAD)];
        let is_result = markers.tool_response.is_some_and(|marker| head.contains(&marker));
        head.get(1) != model && !is_result
    })
}
