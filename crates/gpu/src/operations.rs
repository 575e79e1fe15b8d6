//! Arithmetic of a pass, stage by stage: operations of its matrix products, of attention and of the recurrence. A
//! multiplication and an addition are two. Norms, gates, softmax and sampling are left out: they are few.

use lily_model::cost::OPS_PER_PRODUCT;
use lily_model::geometry::LayerKind;
use lily_model::weights::Weights;

use crate::packing;
use crate::stage::Stage;

/// Operations that a token does with each number of a recurrent state: one for the decay, two each for recall, write and
/// answer.
const RECURRENCE: u64 = 7;
/// Products of a query with a position: with the key for the score, with the value for the sum.
const ATTENTION_PRODUCTS: u64 = 2;

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Positions before the first of them.
    pub seen: usize,
    /// How many they are.
    pub count: usize,
    /// How many of them go through the head.
    pub heads: usize,
}

/// Operations of `stage` for `tokens`.
pub fn operations(weights: &Weights, stage: Stage, tokens: Tokens) -> u64 {
    let geometry = &weights.geometry;
    let (attention, delta, moe) = (&geometry.attention, &geometry.delta, &geometry.moe);
    let (seen, count) = (tokens.seen as u64, tokens.count as u64);
    let layers = |kind| geometry.count(kind) as u64;
    match stage {
        // A row of the table is unpacked, a token chosen: no products.
        Stage::Embed | Stage::Sample => 0,
        Stage::DeltaCore => {
            let taps = (delta.conv_channels() * delta.conv_width) as u64;
            let state = delta.state_elements() as u64;
            layers(LayerKind::Delta) * count * (RECURRENCE * state + OPS_PER_PRODUCT * taps)
        }
        Stage::AttnCore => {
            // Each token with all before it, and with itself.
            let pairs = count * seen + count * (count + 1) / 2;
            let width = (attention.heads * attention.head_dim) as u64;
            layers(LayerKind::Attention) * pairs * ATTENTION_PRODUCTS * OPS_PER_PRODUCT * width
        }
        Stage::Head => {
            let [_, head] = packing::outer_groups(weights);
            let products = head.matrices.iter().map(|(_, matrix)| (matrix.rows * matrix.cols) as u64);
            tokens.heads as u64 * OPS_PER_PRODUCT * products.sum::<u64>()
        }
        _ => {
            let groups = weights.layers.iter().flat_map(packing::groups);
            let matrices = groups.filter(|group| group.name == stage.name()).flat_map(|group| group.matrices);
            let products = matrices.map(|(_, matrix)| {
                let times = if matrix.count > 1 { moe.top_k } else { 1 };
                (times * matrix.rows * matrix.cols) as u64
            });
            count * OPS_PER_PRODUCT * products.sum::<u64>()
        }
    }
}

#[cfg(test)]
mod tests {
    use lily_model::cost::Cost;
    use lily_model::geometry::Geometry;

    use super::*;

    /// What `lily_model::cost` leaves out, attention and the recurrence, as a part of what it counts: for the 4.9 GFLOP of a
    /// token at most so much in a prompt of 2,048.
    const LEFT_OUT: f64 = 0.08;

    #[test]
    fn a_prompts_operations_are_the_models_cost_and_a_little_attention_and_recurrence() {
        let weights = Weights::outline(&Geometry::qwen3_6_35b_a3b());
        let tokens = Tokens { seen: 0, count: 2048, heads: 1 };
        let cores = [Stage::DeltaCore, Stage::AttnCore];
        let sum = |stages: &mut dyn Iterator<Item = Stage>| -> u64 {
            stages.map(|stage| operations(&weights, stage, tokens)).sum()
        };
        let products = sum(&mut Stage::ALL.into_iter().filter(|stage| !cores.contains(stage)));
        assert_eq!(products, Cost::of(&weights).prefill_ops(2048));
        let rest = sum(&mut cores.into_iter()) as f64 / products as f64;
        assert!(rest > 0.0 && rest < LEFT_OUT, "{rest}");
    }

    #[test]
    fn a_token_meets_every_position_before_it_and_itself() {
        let weights = Weights::outline(&Geometry::qwen3_6_35b_a3b());
        let tokens = Tokens { seen: 4, count: 2, heads: 0 };
        // 16 heads of 256 in ten layers, four operations for a pair of positions and each dim.
        assert_eq!(operations(&weights, Stage::AttnCore, tokens), 10 * (5 + 6) * 4 * 16 * 256);
        assert_eq!(operations(&weights, Stage::Head, tokens), 0);
    }
}
