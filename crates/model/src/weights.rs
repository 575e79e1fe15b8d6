//! The weights of the model as a backend sees them: named, checked against the [`Geometry`], still in place.
//!
//! Matrices stay in the mapped files ([`Blob`] is a reference-counted range of one) in the layout that the
//! checkpoint has: row-major, one row per output, affine 4- or 8-bit in groups of [`GROUP_SIZE`] along the
//! input, or bf16/f16/f32. Bytes are little-endian and **not aligned** to their element. Vectors (norms,
//! convolution taps, gates' constants) are small and come as f32, norms in the form that is multiplied as is.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::geometry::{Geometry, LayerKind};

/// Input elements that share one scale and one bias in the affine formats.
pub const GROUP_SIZE: usize = 64;

/// A byte range of a mapped file, of the binary itself or of memory, kept alive by reference counting.
#[derive(Clone)]
pub struct Blob {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Blob {
    /// All bytes of `owner`, whose `as_ref` must always return the same slice.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Blob {
        let range = 0..(*owner).as_ref().len();
        Blob { owner, range }
    }

    /// No bytes.
    pub fn empty() -> Blob {
        Blob::new(Arc::new([]))
    }

    /// All bytes of the owner, and where this blob begins in them.
    pub fn origin(&self) -> (Blob, usize) {
        (Blob::new(self.owner.clone()), self.range.start)
    }

    /// The sub-range `range` of this blob, or `None` where it reaches outside.
    pub fn slice(&self, range: Range<usize>) -> Option<Blob> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(Blob { owner: self.owner.clone(), range: start..start + range.len() })
    }
}

impl Deref for Blob {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl fmt::Debug for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blob({} bytes)", self.range.len())
    }
}

/// Element format of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 4 bits, packed eight to a u32, lowest nibble first; `w = scale * q + bias` per group.
    Affine4,
    /// 8 bits, packed four to a u32, lowest byte first; `w = scale * q + bias` per group.
    Affine8,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

impl Format {
    /// Bytes of one row of `cols` elements, scales and biases not counted.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Format::Affine4 => cols / 2,
            Format::Affine8 => cols,
            Format::Bf16 | Format::F16 => cols * 2,
            Format::F32 => cols * 4,
        }
    }

    /// Whether rows carry a bf16 scale and a bf16 bias per [`GROUP_SIZE`] elements.
    pub fn is_affine(self) -> bool {
        matches!(self, Format::Affine4 | Format::Affine8)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Affine4 => "4-bit",
            Format::Affine8 => "8-bit",
            Format::Bf16 => "BF16",
            Format::F16 => "F16",
            Format::F32 => "F32",
        })
    }
}

/// One matrix, borrowed: what a kernel is given.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a> {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Element format.
    pub format: Format,
    /// Elements, `rows * format.row_bytes(cols)` bytes.
    pub data: &'a [u8],
    /// bf16 scales, `[rows, cols / GROUP_SIZE]`; empty unless affine.
    pub scales: &'a [u8],
    /// bf16 biases, `[rows, cols / GROUP_SIZE]`; empty unless affine.
    pub biases: &'a [u8],
}

/// A stack of equally shaped matrices in the checkpoint's layout; a plain projection is a stack of one.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Matrices in the stack: 1, or the number of experts.
    pub count: usize,
    /// Outputs of each.
    pub rows: usize,
    /// Inputs of each.
    pub cols: usize,
    /// Element format of all.
    pub format: Format,
    /// Elements of the first matrix start here.
    pub data: Blob,
    /// Bytes from one matrix of the stack to the next in `data` (larger than one matrix where two
    /// projections are stored interleaved, as Hugging Face's fused `gate_up_proj`).
    pub data_stride: usize,
    /// bf16 scales of the whole stack, `[count, rows, cols / GROUP_SIZE]`; empty unless affine.
    pub scales: Blob,
    /// bf16 biases, like `scales`.
    pub biases: Blob,
}

impl Matrix {
    /// A stack of no matrices: what stands in for one that could not be loaded.
    pub(crate) fn none() -> Matrix {
        let (data, scales, biases) = (Blob::empty(), Blob::empty(), Blob::empty());
        Matrix { count: 0, rows: 0, cols: 0, format: Format::Bf16, data, data_stride: 0, scales, biases }
    }

    /// Bytes of the elements of one matrix of the stack.
    pub fn data_bytes(&self) -> usize {
        self.rows * self.format.row_bytes(self.cols)
    }

    /// Groups with a scale and a bias in one matrix of the stack; 0 unless affine.
    pub fn groups(&self) -> usize {
        if self.format.is_affine() { self.rows * (self.cols / GROUP_SIZE) } else { 0 }
    }

    /// The only matrix of a stack of one.
    pub fn view(&self) -> MatrixView<'_> {
        debug_assert_eq!(self.count, 1);
        self.at(0)
    }

    /// Matrix `index` of the stack. Panics where `index >= count`.
    pub fn at(&self, index: usize) -> MatrixView<'_> {
        assert!(index < self.count, "matrix {index} of a stack of {}", self.count);
        let bytes = self.data_bytes();
        let start = index * self.data_stride;
        let groups = self.groups() * size_of::<u16>();
        MatrixView {
            rows: self.rows,
            cols: self.cols,
            format: self.format,
            data: &self.data[start..start + bytes],
            scales: &self.scales[index * groups..(index + 1) * groups],
            biases: &self.biases[index * groups..(index + 1) * groups],
        }
    }
}

/// Weights of a Gated DeltaNet mixer.
#[derive(Clone, Debug)]
pub struct DeltaWeights {
    /// Queries, keys, values: `[conv_channels, hidden]`.
    pub in_proj_qkv: Matrix,
    /// Output gate: `[value_width, hidden]`.
    pub in_proj_z: Matrix,
    /// Write strength: `[value_heads, hidden]`.
    pub in_proj_b: Matrix,
    /// Decay: `[value_heads, hidden]`.
    pub in_proj_a: Matrix,
    /// Convolution taps, `[conv_channels, conv_width]`, oldest token first.
    pub conv1d: Vec<f32>,
    /// `[value_heads]`.
    pub a_log: Vec<f32>,
    /// `[value_heads]`.
    pub dt_bias: Vec<f32>,
    /// Gated RMS norm of each value head, `[value_dim]`.
    pub norm: Vec<f32>,
    /// `[hidden, value_width]`.
    pub out_proj: Matrix,
}

/// Weights of a full-attention mixer.
#[derive(Clone, Debug)]
pub struct AttentionWeights {
    /// Query and gate of each head in turn: `[heads * 2 * head_dim, hidden]`.
    pub q_proj: Matrix,
    /// `[kv_heads * head_dim, hidden]`.
    pub k_proj: Matrix,
    /// `[kv_heads * head_dim, hidden]`.
    pub v_proj: Matrix,
    /// `[hidden, heads * head_dim]`.
    pub o_proj: Matrix,
    /// RMS norm of each query head, `[head_dim]`.
    pub q_norm: Vec<f32>,
    /// RMS norm of each key head, `[head_dim]`.
    pub k_norm: Vec<f32>,
}

/// A layer's mixer.
#[derive(Clone, Debug)]
pub enum Mixer {
    /// Gated DeltaNet.
    Delta(DeltaWeights),
    /// Full attention.
    Attention(AttentionWeights),
}

/// Weights of a mixture of experts.
#[derive(Clone, Debug)]
pub struct MoeWeights {
    /// Router: `[experts, hidden]`.
    pub gate: Matrix,
    /// Stack over experts of `[expert_width, hidden]`.
    pub gate_proj: Matrix,
    /// Stack over experts of `[expert_width, hidden]`.
    pub up_proj: Matrix,
    /// Stack over experts of `[hidden, expert_width]`.
    pub down_proj: Matrix,
    /// Shared expert: `[shared_width, hidden]`.
    pub shared_gate_proj: Matrix,
    /// Shared expert: `[shared_width, hidden]`.
    pub shared_up_proj: Matrix,
    /// Shared expert: `[hidden, shared_width]`.
    pub shared_down_proj: Matrix,
    /// Gate of the shared expert's output: `[1, hidden]`.
    pub shared_expert_gate: Matrix,
}

/// One decoder layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// RMS norm before the mixer, `[hidden]`.
    pub input_norm: Vec<f32>,
    /// The mixer.
    pub mixer: Mixer,
    /// RMS norm before the experts, `[hidden]`.
    pub post_norm: Vec<f32>,
    /// The experts.
    pub moe: MoeWeights,
}

/// The whole decoder's weights, checked against `geometry`.
#[derive(Clone, Debug)]
pub struct Weights {
    /// The shape that all tensors below agree with.
    pub geometry: Geometry,
    /// Embedding table: `[vocab, hidden]`.
    pub embed_tokens: Matrix,
    /// First layer to last.
    pub layers: Vec<LayerWeights>,
    /// RMS norm before the head, `[hidden]`.
    pub norm: Vec<f32>,
    /// `[vocab, hidden]`; the embedding table itself where the head is tied.
    pub lm_head: Matrix,
}

impl Weights {
    /// The shapes and formats that the published 4-bit checkpoint has at `geometry` (4-bit projections, 8-bit
    /// routers), with no bytes behind the matrices and zeros in the vectors: for what is computed from shapes
    /// alone.
    pub fn outline(geometry: &Geometry) -> Weights {
        let Geometry { hidden, attention, delta, moe, .. } = geometry;
        let width = attention.heads * attention.head_dim;
        let kv_width = attention.kv_heads * attention.head_dim;
        let layer = |kind: &LayerKind| LayerWeights {
            input_norm: vec![0.0; *hidden],
            mixer: match kind {
                LayerKind::Delta => Mixer::Delta(DeltaWeights {
                    in_proj_qkv: outline(1, delta.conv_channels(), *hidden, Format::Affine4),
                    in_proj_z: outline(1, delta.value_width(), *hidden, Format::Affine4),
                    in_proj_b: outline(1, delta.value_heads, *hidden, Format::Affine4),
                    in_proj_a: outline(1, delta.value_heads, *hidden, Format::Affine4),
                    conv1d: vec![0.0; delta.conv_channels() * delta.conv_width],
                    a_log: vec![0.0; delta.value_heads],
                    dt_bias: vec![0.0; delta.value_heads],
                    norm: vec![0.0; delta.value_dim],
                    out_proj: outline(1, *hidden, delta.value_width(), Format::Affine4),
                }),
                LayerKind::Attention => Mixer::Attention(AttentionWeights {
                    q_proj: outline(1, 2 * width, *hidden, Format::Affine4),
                    k_proj: outline(1, kv_width, *hidden, Format::Affine4),
                    v_proj: outline(1, kv_width, *hidden, Format::Affine4),
                    o_proj: outline(1, *hidden, width, Format::Affine4),
                    q_norm: vec![0.0; attention.head_dim],
                    k_norm: vec![0.0; attention.head_dim],
                }),
            },
            post_norm: vec![0.0; *hidden],
            moe: MoeWeights {
                gate: outline(1, moe.experts, *hidden, Format::Affine8),
                gate_proj: outline(moe.experts, moe.expert_width, *hidden, Format::Affine4),
                up_proj: outline(moe.experts, moe.expert_width, *hidden, Format::Affine4),
                down_proj: outline(moe.experts, *hidden, moe.expert_width, Format::Affine4),
                shared_gate_proj: outline(1, moe.shared_width, *hidden, Format::Affine4),
                shared_up_proj: outline(1, moe.shared_width, *hidden, Format::Affine4),
                shared_down_proj: outline(1, *hidden, moe.shared_width, Format::Affine4),
                shared_expert_gate: outline(1, 1, *hidden, Format::Affine8),
            },
        };
        Weights {
            layers: geometry.layers.iter().map(layer).collect(),
            embed_tokens: outline(1, geometry.vocab, *hidden, Format::Affine4),
            norm: vec![0.0; *hidden],
            lm_head: outline(1, geometry.vocab, *hidden, Format::Affine4),
            geometry: geometry.clone(),
        }
    }
}

fn outline(count: usize, rows: usize, cols: usize, format: Format) -> Matrix {
    Matrix { count, rows, cols, format, data_stride: rows * format.row_bytes(cols), ..Matrix::none() }
}
