//! The checkpoint's tensors to the card: what each of the plan's weight buffers holds, and how it gets there.
//!
//! Each buffer is cut into pieces. Threads take one after the other, write it into pinned memory in the card's
//! layout, straight from the mapped file, and hand it to the copy engine while they write the next.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use lily_gpu::packing::{self, Group};
use lily_gpu::plan::{Plan, Role};
use lily_gpu::target::TILE_ROWS;
use lily_model::geometry::AttentionGeometry;
use lily_model::weights::{Matrix, Weights};

use crate::driver::{Event, Gpu, Memory, Pinned};
use crate::error::CudaError;
use crate::tiles::{self, Row};

/// Bytes of a staging buffer: large enough for the bus to run at full speed.
const STAGING: usize = 8 << 20;
/// Where buffers begin: what the widest loads want.
const ALIGNMENT: u64 = 256;
/// Rows of gate and of up projections that stand beside each other, so that one tile has both.
const INTERLEAVED: usize = TILE_ROWS / 2;
/// The most threads: more do not make the bus faster.
const MOST_THREADS: usize = 16;

/// What a buffer holds.
enum Content<'a> {
    /// Tiles of a group's matrices.
    Tiles(Group<'a>),
    /// The words of a 4-bit table as they are.
    Words(&'a Matrix),
    /// Its scales and biases, in pairs.
    Pairs(&'a Matrix),
    /// Numbers.
    Floats(Vec<f32>),
}

/// Where the weights lie on the card.
#[derive(Debug)]
pub struct Loaded {
    addresses: HashMap<String, u64>,
    _memory: Memory,
}

impl Loaded {
    /// The address of a weight buffer of the plan.
    pub fn address(&self, name: &str) -> Option<u64> {
        self.addresses.get(name).copied()
    }
}

/// Bytes of the plan's weights on the card.
pub fn bytes(plan: &Plan) -> u64 {
    let buffers = plan.buffers.iter().filter(|buffer| buffer.role == Role::Weights);
    buffers.map(|buffer| buffer.bytes.next_multiple_of(ALIGNMENT)).sum()
}

/// Copies everything that `plan` names; `progress` is called with bytes done and bytes in all.
pub fn load(
    gpu: &Arc<Gpu>,
    weights: &Weights,
    plan: &Plan,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Loaded, CudaError> {
    let total = bytes(plan);
    let memory = gpu.allocate("the weights", usize::try_from(total).unwrap_or(usize::MAX))?;
    gpu.synchronize()?;
    let contents = contents(weights);
    let mut addresses = HashMap::new();
    let mut pieces = Vec::new();
    let mut next = memory.address();
    for buffer in plan.buffers.iter().filter(|buffer| buffer.role == Role::Weights) {
        let content = contents.get(&buffer.name).ok_or_else(|| {
            CudaError::Model(format!("its plan names {}, which nothing fills", buffer.name))
        })?;
        let step = content.step();
        let bytes = buffer.bytes as usize;
        pieces.extend((0..bytes).step_by(step).map(|start| Piece {
            content,
            to: next + start as u64,
            start,
            bytes: step.min(bytes - start),
        }));
        addresses.insert(buffer.name.clone(), next);
        next += buffer.bytes.next_multiple_of(ALIGNMENT);
    }
    copy(gpu, &pieces, &|done| progress(done, total))?;
    Ok(Loaded { addresses, _memory: memory })
}

/// A part of a buffer.
struct Piece<'a> {
    content: &'a Content<'a>,
    to: u64,
    start: usize,
    bytes: usize,
}

fn copy(gpu: &Arc<Gpu>, pieces: &[Piece<'_>], progress: &(dyn Fn(u64) + Sync)) -> Result<(), CudaError> {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || -> Result<(), CudaError> {
        let stream = gpu.stream()?;
        let mut staging: Vec<(Pinned, Option<Event>)> =
            (0..2).map(|_| Ok((gpu.pinned(STAGING)?, None))).collect::<Result<_, CudaError>>()?;
        for turn in (0..staging.len()).cycle() {
            let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            let (pinned, busy) = &mut staging[turn];
            if let Some(event) = busy.take() {
                event.wait()?;
            }
            piece.content.write(piece.start, &mut pinned.bytes_mut()[..piece.bytes]);
            stream.upload(piece.to, pinned, 0, piece.bytes)?;
            *busy = Some(stream.mark()?);
            progress(done.fetch_add(piece.bytes, Ordering::Relaxed) as u64 + piece.bytes as u64);
        }
        staging.iter().filter_map(|(_, busy)| busy.as_ref()).try_for_each(Event::wait)
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).clamp(1, MOST_THREADS);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a copy does not panic"))
    })
}

/// What each weight buffer holds, by its name in the plan.
fn contents(weights: &Weights) -> HashMap<String, Content<'_>> {
    let mut contents = HashMap::new();
    let [embed, head] = packing::outer_groups(weights);
    let table = embed.matrices[0].1;
    contents.insert("embed".to_owned(), Content::Words(table));
    contents.insert("embed.pairs".to_owned(), Content::Pairs(table));
    contents.insert("head".to_owned(), Content::Tiles(head));
    contents.insert("norm".to_owned(), Content::Floats(weights.norm.clone()));
    let frequencies = frequencies(&weights.geometry.attention);
    contents.insert("inv_freq".to_owned(), Content::Floats(frequencies));
    for (index, layer) in weights.layers.iter().enumerate() {
        for group in packing::groups(layer) {
            contents.insert(format!("layers.{index}.{}", group.name), Content::Tiles(group));
        }
        for (name, vector) in packing::vectors(layer) {
            contents.insert(format!("layers.{index}.{name}"), Content::Floats(vector.to_vec()));
        }
    }
    contents
}

/// Rotary frequencies as the reference has them, rounded at every step.
fn frequencies(attention: &AttentionGeometry) -> Vec<f32> {
    let base = attention.rope_theta as f32;
    (0..attention.rotary_dim / 2)
        .map(|i| 1.0 / base.powf((2 * i) as f32 / attention.rotary_dim as f32))
        .collect()
}

impl Content<'_> {
    /// Bytes of a piece: whole units that fit a staging buffer.
    fn step(&self) -> usize {
        let unit = match self {
            Content::Tiles(group) => {
                let matrix = group.matrices[0].1;
                tiles::tile_bytes(matrix.format, matrix.cols)
            }
            Content::Words(_) => 1,
            Content::Pairs(_) | Content::Floats(_) => size_of::<u32>(),
        };
        STAGING / unit * unit
    }

    /// Writes the bytes from `start` on.
    fn write(&self, start: usize, out: &mut [u8]) {
        match self {
            Content::Tiles(group) => {
                let matrix = group.matrices[0].1;
                let bytes = tiles::tile_bytes(matrix.format, matrix.cols);
                for (index, tile) in out.chunks_exact_mut(bytes).enumerate() {
                    let first = (start / bytes + index) * TILE_ROWS;
                    let rows = std::array::from_fn(|place| row(group, first + place));
                    tiles::pack(&rows, matrix.format, tile);
                }
            }
            Content::Words(matrix) => out.copy_from_slice(&matrix.data[start..start + out.len()]),
            Content::Pairs(matrix) => {
                for (index, pair) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let at = (start / 4 + index) * 2;
                    pair[..2].copy_from_slice(&matrix.scales[at..at + 2]);
                    pair[2..].copy_from_slice(&matrix.biases[at..at + 2]);
                }
            }
            Content::Floats(floats) => {
                let floats = floats[start / 4..].iter();
                for (bytes, float) in out.as_chunks_mut::<4>().0.iter_mut().zip(floats) {
                    *bytes = float.to_le_bytes();
                }
            }
        }
    }
}

/// Row `index` of a group's matrices as they lie on the card: experts first, one after the other, the shared one
/// last; gate and up projections in turns of [`INTERLEAVED`] rows; all others as the group has them.
fn row<'a>(group: &Group<'a>, mut index: usize) -> Option<Row<'a>> {
    let matrices = &group.matrices;
    let (turn, members) = if group.name == "moe_up" { (INTERLEAVED, 2) } else { (usize::MAX, 1) };
    if group.name != "moe_up" && group.name != "moe_down" {
        for (_, matrix) in matrices {
            if index < matrix.rows {
                return Some((matrix.at(0), index));
            }
            index -= matrix.rows;
        }
        return None;
    }
    // Stacks of experts, then the same of the shared expert.
    let rows = matrices[0].1.rows;
    let (expert, within) = (index / (members * rows), index % (members * rows));
    let (member, row) = match members {
        1 => (0, within),
        _ => (within / turn % members, within / (turn * members) * turn + within % turn),
    };
    let routed = matrices[member].1;
    if expert < routed.count {
        return Some((routed.at(expert), row));
    }
    (expert == routed.count).then(|| (matrices[members + member].1.at(0), row))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lily_gpu::decode::{self, Shape};
    use lily_gpu::target::Target;
    use lily_model::checkpoint::Checkpoint;

    #[test]
    fn every_weight_buffer_of_the_plan_is_filled_to_its_last_byte() {
        let weights = Checkpoint::demo().unwrap().weights().unwrap();
        packing::check_formats(&weights).unwrap();
        let plan = decode::record(&weights, Target::HOPPER, Shape { rows: 1, context: 64, sampled: false });
        let contents = contents(&weights);
        for buffer in plan.buffers.iter().filter(|buffer| buffer.role == Role::Weights) {
            let content = &contents[&buffer.name];
            let rows = match content {
                Content::Tiles(group) => {
                    let matrix = group.matrices[0].1;
                    let bytes = tiles::tile_bytes(matrix.format, matrix.cols);
                    let tiles = buffer.bytes as usize / bytes;
                    assert_eq!(tiles * bytes, buffer.bytes as usize, "{}", buffer.name);
                    let all: usize =
                        group.matrices.iter().map(|(_, matrix)| matrix.count * matrix.rows).sum();
                    assert_eq!(all.div_ceil(TILE_ROWS), tiles, "{}", buffer.name);
                    assert_eq!((0..all).filter(|&index| row(group, index).is_some()).count(), all);
                    assert!(row(group, all).is_none(), "{}", buffer.name);
                    continue;
                }
                Content::Words(matrix) => matrix.data.len(),
                Content::Pairs(matrix) => matrix.scales.len() + matrix.biases.len(),
                Content::Floats(floats) => floats.len() * 4,
            };
            assert_eq!(rows, buffer.bytes as usize, "{}", buffer.name);
        }
    }

    #[test]
    fn gate_and_up_rows_take_turns_and_the_shared_expert_is_last() {
        let weights = Checkpoint::demo().unwrap().weights().unwrap();
        let groups = packing::groups(&weights.layers[0]);
        let up = groups.iter().find(|group| group.name == "moe_up").unwrap();
        let width = up.matrices[0].1.rows;
        let at = |index: usize| {
            let (matrix, row) = row(up, index).unwrap();
            (matrix.data.as_ptr(), row)
        };
        let of = |member: usize, expert: usize| up.matrices[member].1.at(expert).data.as_ptr();
        assert_eq!((at(7), at(8), at(16)), ((of(0, 0), 7), (of(1, 0), 0), (of(0, 0), 8)));
        assert_eq!(at(2 * width + 1), (of(0, 1), 1));
        let experts = up.matrices[0].1.count;
        assert_eq!(at(2 * width * experts + 9), (of(3, 0), 1));
    }
}
