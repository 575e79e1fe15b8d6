//! What differs between the devices that a plan is made for: where weights lie, and how a kernel is cut into
//! blocks.
//!
//! How many rows, sequences or experts a kernel is launched for is the plan's to say. How it divides its own work, one
//! row's, is the kernel's: what stands here is what a plan assumes that is made without a card, and a backend takes
//! over what its compiled kernels say.

use lily_model::geometry::MoeGeometry;

/// A device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// An NVIDIA card.
    Cuda {
        /// Its streaming multiprocessors.
        cores: u32,
    },
    /// An Apple GPU.
    Metal {
        /// Its cores.
        cores: u32,
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

/// Bytes of a chunk of one row's activations as a product reads them.
pub const ACTIVATION_CHUNK_BYTES: usize = 544;
/// The most bytes of the next layer's weights that a kernel asks the cache for.
pub const ASKED_AHEAD: u64 = 10 << 20;

/// Threads of a warp.
const WARP: usize = 32;
/// Warps of a block of a dense product on CUDA, of the kernels of the experts, and of attention.
const DENSE_WARPS: usize = 16;
const EXPERT_WARPS: usize = 8;
const ATTENTION_WARPS: usize = 4;
/// On Metal: rows of a matrix that a threadgroup works on at once, its threads, and how many of them a core has.
const METAL_ROWS: usize = 16;
const METAL_THREADS: u32 = 256;
const METAL_GROUPS: u32 = 8;

impl Target {
    /// An H100 or H200, for plans that are made without a card.
    pub const HOPPER: Target = Target::Cuda { cores: 132 };
    /// An Apple GPU of the Max class, for plans that are made without one.
    pub const APPLE_MAX: Target = Target::Metal { cores: 40 };

    /// How weights lie there.
    pub fn weights(self) -> WeightLayout {
        match self {
            Target::Cuda { .. } => WeightLayout::Tiles,
            Target::Metal { .. } => WeightLayout::InPlace,
        }
    }

    /// A product of a matrix of `rows` rows with a step of `batch` rows.
    pub fn dense(self, rows: usize, batch: usize) -> Launch {
        match self {
            Target::Cuda { .. } => {
                self.tiles(rows.div_ceil(TILE_ROWS), batch.div_ceil(ROW_GROUP), DENSE_WARPS)
            }
            Target::Metal { .. } => self.blocks_of_rows(rows),
        }
    }

    /// Attention of `batch` rows over parts of their caches.
    pub fn attention(self, kv_heads: usize, spans: usize, batch: usize) -> Launch {
        Launch::plain([spans as u32, kv_heads as u32, batch as u32], (ATTENTION_WARPS * WARP) as u32)
    }

    /// The router and the shared expert's gate and up projections.
    pub fn moe_route(self, moe: &MoeGeometry, batch: usize) -> Launch {
        let Target::Cuda { .. } = self else {
            return self.blocks_of_rows(moe.experts + 1 + 2 * moe.shared_width);
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
            Target::Cuda { cores } => Launch::plain([cores, 1, 1], (EXPERT_WARPS * WARP) as u32),
            Target::Metal { .. } => self.blocks_of_rows(batch * moe.top_k * 2 * moe.expert_width),
        }
    }

    /// Down projections of all experts of a step of `batch` rows.
    pub fn moe_down(self, moe: &MoeGeometry, hidden: usize, batch: usize) -> Launch {
        match self {
            Target::Cuda { .. } if batch == 1 => {
                let grid = [hidden.div_ceil(TILE_ROWS) as u32, 1, 1];
                Launch::plain(grid, ((moe.top_k + 1) * WARP) as u32)
            }
            Target::Cuda { cores } => Launch::plain([cores, 1, 1], (EXPERT_WARPS * WARP) as u32),
            Target::Metal { .. } => self.blocks_of_rows(hidden * batch),
        }
    }

    /// Tiles dealt out evenly, at most one block to a core.
    fn tiles(self, tiles: usize, groups: usize, warps: usize) -> Launch {
        let (Target::Cuda { cores } | Target::Metal { cores }) = self;
        let blocks = tiles.div_ceil(tiles.div_ceil(cores as usize));
        Launch::plain([blocks as u32, groups as u32, 1], (warps * WARP) as u32)
    }

    /// One threadgroup for each few rows of a matrix, as far as the device can run them at once.
    fn blocks_of_rows(self, rows: usize) -> Launch {
        let (Target::Cuda { cores } | Target::Metal { cores }) = self;
        let groups = (rows.div_ceil(METAL_ROWS) as u32).min(cores * METAL_GROUPS);
        Launch::plain([groups, 1, 1], METAL_THREADS)
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::Cuda { cores } => write!(f, "CUDA with {cores} multiprocessors"),
            Target::Metal { cores } => write!(f, "Metal with {cores} cores"),
        }
    }
}
