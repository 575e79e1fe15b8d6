//! What differs between the devices that a plan is made for: where weights lie, how keys and values are stored, and how a
//! kernel is cut into blocks.
//!
//! How many rows, sequences or experts a kernel is launched for is the plan's to say. How it divides its own work, one
//! row's, is the kernel's: what stands here is what a plan assumes that is made without a card, and a backend takes
//! over what its compiled kernels say.

use lily_model::geometry::MoeGeometry;

use crate::layout::KvFormat;

/// A device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// An NVIDIA card.
    Cuda {
        /// Its streaming multiprocessors.
        cores: u32,
        /// How keys and values are stored.
        kv: KvFormat,
    },
    /// An Apple GPU.
    Metal {
        /// Its cores.
        cores: u32,
        /// How keys and values are stored.
        kv: KvFormat,
    },
}

/// How weights lie in the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightLayout {
    /// Copied when loading: the projections of a stage are one matrix of tiles, scales and biases among the
    /// elements. One argument.
    Tiles,
    /// In place in the mapped files: elements, scales and biases of each projection. Three arguments each.
    InPlace,
}

/// Blocks, threads and on-chip memory of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks along each axis.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of on-chip memory beside what the kernel declares.
    pub shared_bytes: u32,
}

impl Launch {
    /// Blocks of `threads` threads, with nothing else.
    pub fn plain(grid: [u32; 3], threads: u32) -> Launch {
        Launch { grid, threads, shared_bytes: 0 }
    }
}

/// Rows of a weight tile.
pub const TILE_ROWS: usize = 16;
/// Inputs of a chunk of a weight tile.
pub const CHUNK_INPUTS: usize = 256;
/// Bytes of a chunk of 4-bit weights, scales and biases among them.
pub const CHUNK4_BYTES: usize = 2304;
/// Bytes of a chunk of 8-bit weights, scales and biases among them.
pub const CHUNK8_BYTES: usize = 4352;
/// Rows of a batch that a block takes at once: the columns of a tensor core's product.
pub const ROW_GROUP: usize = 8;

/// Blocks that share a value head's state on CUDA, by columns.
pub const RECURRENCE_PARTS: usize = 4;
/// Bytes of a chunk of one row's activations as a product reads them.
pub const ACTIVATION_CHUNK_BYTES: usize = 544;
/// Bytes of such a row that stand beside its chunks: the factor of the norm.
const PACKED_ROW_BYTES: usize = 16;
/// The most bytes of the next layer's weights that a kernel asks the cache for.
pub const ASKED_AHEAD: u64 = 10 << 20;

/// Threads of a warp.
const WARP: usize = 32;
/// Warps of a block of a dense product on CUDA, of the kernels of the experts, and of attention.
const DENSE_WARPS: usize = 16;
const EXPERT_WARPS: usize = 8;
const ATTENTION_WARPS: usize = 4;
/// On Metal: rows of a batch that a threadgroup multiplies at once.
pub const METAL_ROW_GROUP: usize = 4;
/// Its threads, and how many such threadgroups a core is given at the most.
const METAL_THREADS: u32 = 256;
const METAL_GROUPS: usize = 8;
/// Rows of a matrix that it has at once, four to a SIMD-group; half of them where there would be too few threadgroups
/// otherwise, which is below [`METAL_LARGE`] rows.
const METAL_TILE: usize = 32;
const METAL_SMALL_TILE: usize = 16;
const METAL_LARGE: usize = 4096;
/// Threads that hold the state of a value head, and of a threadgroup that works on a row element by element.
const METAL_STATE_THREADS: u32 = 512;
const ROW_THREADS: u32 = 256;

impl Target {
    /// An H100 or H200, for plans that are made without a card.
    pub const HOPPER: Target = Target::Cuda { cores: 132, kv: KvFormat::F16 };
    /// An Apple GPU of the Max class, for plans that are made without one.
    pub const APPLE_MAX: Target = Target::Metal { cores: 40, kv: KvFormat::F16 };

    /// How weights lie there.
    pub fn weights(self) -> WeightLayout {
        match self {
            Target::Cuda { .. } => WeightLayout::Tiles,
            Target::Metal { .. } => WeightLayout::InPlace,
        }
    }

    /// The same with keys and values that are stored as `kv` says.
    pub fn with_kv(self, kv: KvFormat) -> Target {
        match self {
            Target::Cuda { cores, .. } => Target::Cuda { cores, kv },
            Target::Metal { cores, .. } => Target::Metal { cores, kv },
        }
    }

    /// How keys and values are stored.
    pub fn kv(self) -> KvFormat {
        let (Target::Cuda { kv, .. } | Target::Metal { kv, .. }) = self;
        kv
    }

    /// Bytes of a row of what the experts multiply: rounded integers with their factors and the norm's, or f32.
    pub fn packed_bytes(self, hidden: usize) -> usize {
        match self {
            Target::Cuda { .. } => hidden.div_ceil(CHUNK_INPUTS) * ACTIVATION_CHUNK_BYTES + PACKED_ROW_BYTES,
            Target::Metal { .. } => hidden * size_of::<f32>(),
        }
    }

    /// A product of a matrix of `rows` rows with a step of `batch` rows.
    pub fn dense(self, rows: usize, batch: usize) -> Launch {
        match self {
            Target::Cuda { .. } => {
                self.tiles(rows.div_ceil(TILE_ROWS), batch.div_ceil(ROW_GROUP), DENSE_WARPS)
            }
            Target::Metal { .. } => {
                let tile = if rows > METAL_LARGE { METAL_TILE } else { METAL_SMALL_TILE };
                self.metal(rows.div_ceil(tile), batch)
            }
        }
    }

    /// Blocks that a product with a matrix of `rows` rows is dealt out to, for each row of the step.
    pub fn dense_blocks(self, rows: usize, batch: usize) -> usize {
        let [x, y, _] = self.dense(rows, batch).grid;
        (if self.weights() == WeightLayout::Tiles { x } else { y }) as usize
    }

    /// The recurrence of `batch` sequences.
    pub fn recurrence(self, value_heads: usize, batch: usize) -> Launch {
        match self {
            Target::Cuda { .. } => {
                Launch::plain([(value_heads * RECURRENCE_PARTS) as u32, batch as u32, 1], ROW_THREADS)
            }
            Target::Metal { .. } => Launch::plain([value_heads as u32, batch as u32, 1], METAL_STATE_THREADS),
        }
    }

    /// Attention of `batch` rows over parts of their caches.
    pub fn attention(self, kv_heads: usize, spans: usize, batch: usize) -> Launch {
        Launch::plain([spans as u32, kv_heads as u32, batch as u32], (ATTENTION_WARPS * WARP) as u32)
    }

    /// The router and the shared expert's gate and up projections.
    pub fn moe_route(self, moe: &MoeGeometry, batch: usize) -> Launch {
        let Target::Cuda { .. } = self else {
            let tiles =
                (moe.experts + 1).div_ceil(METAL_SMALL_TILE) + moe.shared_width.div_ceil(METAL_TILE / 2);
            return self.metal(tiles, batch);
        };
        let tiles = (moe.experts + 1).div_ceil(TILE_ROWS) + moe.shared_width.div_ceil(ROW_GROUP);
        let grid = [tiles as u32, batch.div_ceil(ROW_GROUP) as u32, 1];
        Launch::plain(grid, (EXPERT_WARPS * WARP) as u32)
    }

    /// Gate and up projections of the routed experts of a step of `batch` rows.
    pub fn moe_up(self, moe: &MoeGeometry, batch: usize) -> Launch {
        match self {
            Target::Cuda { .. } if batch == 1 => {
                self.tiles(moe.top_k * moe.expert_width.div_ceil(ROW_GROUP), 1, DENSE_WARPS)
            }
            // Blocks that stay and take one run of rows that share an expert after the other.
            Target::Cuda { cores, .. } => Launch::plain([cores, 1, 1], (EXPERT_WARPS * WARP) as u32),
            Target::Metal { .. } => {
                self.metal(batch * moe.top_k * moe.expert_width.div_ceil(METAL_TILE / 2), 1)
            }
        }
    }

    /// Down projections of all experts of a step of `batch` rows.
    pub fn moe_down(self, moe: &MoeGeometry, hidden: usize, batch: usize) -> Launch {
        match self {
            Target::Cuda { .. } if batch == 1 => {
                let grid = [hidden.div_ceil(TILE_ROWS) as u32, 1, 1];
                Launch::plain(grid, ((moe.top_k + 1) * WARP) as u32)
            }
            Target::Cuda { cores, .. } => Launch::plain([cores, 1, 1], (EXPERT_WARPS * WARP) as u32),
            Target::Metal { .. } if batch == 1 => self.metal(hidden.div_ceil(METAL_SMALL_TILE), 1),
            Target::Metal { .. } => self.metal(batch * (moe.top_k + 1) * hidden.div_ceil(METAL_TILE), 1),
        }
    }

    /// Tiles dealt out evenly, at most one block to a core.
    fn tiles(self, tiles: usize, groups: usize, warps: usize) -> Launch {
        let (Target::Cuda { cores, .. } | Target::Metal { cores, .. }) = self;
        let blocks = tiles.div_ceil(tiles.div_ceil(cores as usize));
        Launch::plain([blocks as u32, groups as u32, 1], (warps * WARP) as u32)
    }

    /// Threadgroups for the tiles of a matrix (y), dealt out evenly, and for a few rows of the step each (x): those that
    /// read the same tile are neighbours.
    fn metal(self, tiles: usize, batch: usize) -> Launch {
        let (Target::Cuda { cores, .. } | Target::Metal { cores, .. }) = self;
        let groups = tiles.div_ceil(tiles.div_ceil(cores as usize * METAL_GROUPS));
        Launch::plain([batch.div_ceil(METAL_ROW_GROUP) as u32, groups as u32, 1], METAL_THREADS)
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::Cuda { cores, .. } => write!(f, "CUDA with {cores} multiprocessors")?,
            Target::Metal { cores, .. } => write!(f, "Metal with {cores} cores")?,
        }
        match self.kv() {
            KvFormat::F16 => Ok(()),
            KvFormat::Q8 => f.write_str(", keys and values in 8 bits"),
        }
    }
}
