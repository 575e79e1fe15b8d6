//! The scratch buffers of the fast pass: they grow to the largest pass seen, which [`prefill_chunk`] bounds,
//! and are used again, so that a decoded token allocates none of them.
//!
//! [`prefill_chunk`]: crate::backend::prefill_chunk

use lily_engine::backend::BackendError;
use lily_model::geometry::Geometry;

use crate::fast::Activations;
use crate::kernels::attention::Partial;
use crate::memory::Buffer;
use crate::stages::delta_core::WorkList;
use crate::stages::moe_down;
use crate::stages::moe_route::Routing;

/// What the stages hand to each other; shapes are `[rows, width]`, and a buffer may be longer than its shape.
#[derive(Default)]
pub struct Workspace {
    /// Residual stream, `[rows, hidden]`.
    pub x: Buffer<f32>,
    /// What a stage's projections read, `[rows, hidden]`.
    pub normed: Activations,
    /// Products before they are added to the residual stream, `[rows, hidden]`.
    pub product: Buffer<f32>,
    /// Rotary angles, `[rows, rotary_dim]`.
    pub angles: Buffer<f32>,
    /// `delta_in` to `delta_core`: `[rows, conv_channels]`.
    pub qkv: Buffer<f32>,
    /// `[rows, value_width]`.
    pub z: Buffer<f32>,
    /// `[rows, value_heads]`.
    pub b: Buffer<f32>,
    /// `[rows, value_heads]`.
    pub a: Buffer<f32>,
    /// The sequences of `delta_core`.
    pub delta_work: WorkList,
    /// What `delta_core` leaves, `[rows, value_width]`.
    pub delta: Activations,
    /// `attn_in` to `attn_core`: `[rows, heads * head_dim]`.
    pub q: Buffer<f32>,
    /// `[rows, heads, 2, head_dim]`.
    pub query_and_gate: Buffer<f32>,
    /// `[rows, kv_heads * head_dim]`.
    pub raw_k: Buffer<f32>,
    /// `[rows, kv_heads * head_dim]`.
    pub k: Buffer<f32>,
    /// `[rows, kv_heads * head_dim]`.
    pub v: Buffer<f32>,
    /// One query's context in parts, where threads share it.
    pub spans: Vec<Partial>,
    /// What `attn_core` leaves, `[rows, heads * head_dim]`.
    pub attention: Activations,
    /// Who goes to which expert.
    pub routing: Routing,
    /// Inner activations of the routed experts, `[rows * top_k, expert_width]`.
    pub routed: Activations,
    /// Inner activations of the shared expert, `[rows, shared_width]`.
    pub shared: Activations,
    /// See [`moe_down::fast`].
    pub products: Buffer<f32>,
    /// Rows that go through the head, `[wanted, hidden]`.
    pub last: Buffer<f32>,
    /// The same, normed.
    pub last_normed: Activations,
}

impl Workspace {
    /// Makes room for a pass of `rows` rows, `wanted` of which go through the head.
    pub fn reserve(&mut self, geometry: &Geometry, rows: usize, wanted: usize) -> Result<(), BackendError> {
        const WHAT: &str = "scratch buffers";
        let Geometry { hidden, attention, delta, moe, .. } = geometry;
        let attention_width = attention.heads * attention.head_dim;
        let buffers = [
            &mut self.x,
            &mut self.product,
            &mut self.angles,
            &mut self.qkv,
            &mut self.z,
            &mut self.b,
            &mut self.a,
            &mut self.q,
            &mut self.query_and_gate,
            &mut self.raw_k,
            &mut self.k,
            &mut self.v,
        ];
        for (buffer, width) in buffers.into_iter().zip(widths(geometry)) {
            buffer.grow(WHAT, rows * width)?;
        }
        self.normed.reserve(rows, *hidden)?;
        self.delta.reserve(rows, delta.value_width())?;
        self.attention.reserve(rows, attention_width)?;
        self.routed.reserve(rows * moe.top_k, moe.expert_width)?;
        self.shared.reserve(rows, moe.shared_width)?;
        self.products.grow(WHAT, moe_down::scratch_elements(*hidden))?;
        self.last.grow(WHAT, wanted * hidden)?;
        self.last_normed.reserve(wanted, *hidden)
    }

    /// Bytes that [`Workspace::reserve`] and the stages that fill these buffers take.
    pub fn bytes(geometry: &Geometry, rows: usize, wanted: usize) -> usize {
        let Geometry { hidden, attention, delta, moe, .. } = geometry;
        let floats = rows * widths(geometry).iter().sum::<usize>()
            + moe_down::scratch_elements(*hidden)
            + wanted * hidden;
        let activations = [
            (rows, *hidden),
            (rows, delta.value_width()),
            (rows, attention.heads * attention.head_dim),
            (rows * moe.top_k, moe.expert_width),
            (rows, moe.shared_width),
            (wanted, *hidden),
        ];
        floats * size_of::<f32>()
            + activations.map(|(rows, width)| Activations::bytes(rows, width)).iter().sum::<usize>()
            + Routing::bytes(moe, rows)
    }

    /// Says how large the next pass is, at most as large as was reserved.
    pub fn set_rows(&mut self, geometry: &Geometry, rows: usize, wanted: usize) {
        for activations in [&mut self.normed, &mut self.delta, &mut self.attention, &mut self.shared] {
            activations.set_rows(rows);
        }
        self.routed.set_rows(rows * geometry.moe.top_k);
        self.last_normed.set_rows(wanted);
    }
}

/// Elements of a row of each plain buffer, in the order in which [`Workspace::reserve`] names them.
fn widths(geometry: &Geometry) -> [usize; 12] {
    let Geometry { hidden, attention, delta, .. } = geometry;
    let attention_width = attention.heads * attention.head_dim;
    let kv_width = attention.kv_heads * attention.head_dim;
    [
        *hidden,
        *hidden,
        attention.rotary_dim,
        delta.conv_channels(),
        delta.value_width(),
        delta.value_heads,
        delta.value_heads,
        attention_width,
        2 * attention_width,
        kv_width,
        kv_width,
        kv_width,
    ]
}
