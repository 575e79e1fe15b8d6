//! The tensors of a quantized checkpoint, in order, with what random weights hold in each.

use crate::geometry::Geometry;
use crate::layout::{Kind, Module};
use crate::shards::StoredTensor;
use crate::weights::Format;

use super::fill::{Fill, word};

/// Standard deviation of the router's logits: the last of the eight experts weighs a fiftieth of the first, so that it
/// matters little which it is.
const ROUTER_DEVIATION: f64 = 4.0;

/// One tensor to be written.
#[derive(Debug)]
pub struct Spec {
    /// Its name, type and shape.
    pub tensor: StoredTensor,
    /// Its contents.
    pub fill: Fill,
}

/// Every tensor of `modules`, which are those of `geometry`.
pub fn list(geometry: &Geometry, modules: &[Module], seed: u64) -> Vec<Spec> {
    let mut streams = 0;
    let mut stream = || {
        streams += 1;
        word(seed, streams)
    };
    let mut specs = Vec::new();
    for module in modules {
        let fills = match module.kind {
            Kind::Matrix(format) => {
                let packed = stream();
                matrix(packed, stream(), format, module.cols(), gain(geometry, module)).to_vec()
            }
            Kind::CentredNorm | Kind::PlainNorm => vec![Fill::Norm { stream: stream() }],
            // Taps of variance 1 / width keep the variance of what they sum.
            Kind::Conv => {
                let bound = (3.0 / geometry.delta.conv_width as f64).sqrt();
                vec![Fill::Uniform { stream: stream(), bound }]
            }
            Kind::ALog => vec![Fill::ALog { stream: stream() }],
            Kind::DtBias => vec![Fill::DtBias { stream: stream() }],
        };
        specs.extend(module.tensors().into_iter().zip(fills).map(|(tensor, fill)| Spec { tensor, fill }));
    }
    specs
}

/// Elements, scales and biases of a projection or a stack of them. Elements are uniform with a standard deviation
/// of `gain / sqrt(inputs)`, so that inputs of unit variance give outputs of standard deviation `gain`.
fn matrix(packed: u64, stream: u64, format: Format, cols: usize, gain: f64) -> [Fill; 3] {
    let max = if format == Format::Affine8 { 255.0 } else { 15.0 };
    // Standard deviation of whole numbers uniform in 0..=max.
    let deviation = ((max + 1.0) * (max + 1.0) - 1.0_f64).sqrt() / 12f64.sqrt();
    let typical = gain / (deviation * (cols as f64).sqrt());
    [Fill::Packed { stream: packed }, Fill::Scales { stream, typical }, Fill::Biases { stream, typical, max }]
}

/// Standard deviation of a projection's outputs.
fn gain(geometry: &Geometry, module: &Module) -> f64 {
    match last_part(module) {
        // A row is the residual stream itself, which starts with unit variance.
        "embed_tokens" => (geometry.hidden as f64).sqrt(),
        // What is added to the residual stream. As in GPT-2: what all layers add together has the variance of one
        // that is not scaled.
        "out_proj" | "o_proj" | "down_proj" => (2.0 * geometry.layers.len() as f64).sqrt().recip(),
        "gate" => ROUTER_DEVIATION,
        _ => 1.0,
    }
}

/// The last part of a module's path.
fn last_part(module: &Module) -> &str {
    module.path.rsplit('.').next().unwrap_or(&module.path)
}
