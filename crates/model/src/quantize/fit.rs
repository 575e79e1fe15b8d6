//! Scale and bias of a group by least squares: nearer to the weights than `mlx.core.quantize`, in the same format.
//!
//! MLX's steps begin at the element farthest from zero and meet zero, so that fifteen of them may end short of the other
//! side or reach beyond it, and elements are chosen before scale and bias lose bits to bf16. Here several steps are tried
//! between narrower and narrower ends. Given the elements, the best scale and bias follow from sums; given those, the
//! best elements are the nearest; a few rounds of both settle. Errors are those of the bf16 scale and bias that are
//! stored. MLX's own are among those tried, so that no group is worse off.

use half::bf16;

use super::{LANES, WHOLE};
use crate::weights::GROUP_SIZE;

/// Ranges that are tried, as parts of the group's own: the ends of a group are often strays.
const RANGES: [f32; 5] = [1.0, 0.94, 0.88, 0.82, 0.76];
/// Rounds from each of them.
const ROUNDS: usize = 3;

/// bf16 scale and bias with the least squared error that was found for a group of elements 0 to `highest`, which lie
/// between `low` and `high`; `start` are MLX's.
pub fn fit(group: &[f32; GROUP_SIZE], highest: f32, start: (f32, f32), low: f32, high: f32) -> (f32, f32) {
    let mut best = (bf16::from_f32(start.0).to_f32(), bf16::from_f32(start.1).to_f32());
    let mut least = Sums::of(group, best, highest).error;
    let mut settle = |mut line: (f32, f32)| {
        for _ in 0..ROUNDS {
            line = (bf16::from_f32(line.0).to_f32(), bf16::from_f32(line.1).to_f32());
            let sums = Sums::of(group, line, highest);
            if sums.error < least {
                (least, best) = (sums.error, line);
            }
            match sums.line(line.1) {
                Some(next) => line = next,
                None => return,
            }
        }
    };
    settle(start);
    for part in RANGES {
        let range = (high - low) * part;
        let cut = (high - low - range) / 2.0;
        settle((range / highest, low + cut));
    }
    best
}

/// Sums over a group, of what a line of scale and bias makes of it.
struct Sums {
    /// Squared distances.
    error: f32,
    /// Elements.
    q: f32,
    /// Their squares.
    qq: f32,
    /// Distances from the bias.
    d: f32,
    /// Their products with the elements.
    dq: f32,
}

impl Sums {
    /// With the elements nearest to `group`.
    fn of(group: &[f32; GROUP_SIZE], (scale, bias): (f32, f32), highest: f32) -> Sums {
        let mut lanes = [[0.0f32; LANES]; 5];
        let (chunks, _) = group.as_chunks::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                let d = chunk[lane] - bias;
                let position = d / scale;
                let position = if position > 0.0 { position } else { 0.0 };
                let position = if position < highest { position } else { highest };
                let q = (position + WHOLE) - WHOLE;
                let off = d - scale * q;
                lanes[0][lane] += off * off;
                lanes[1][lane] += q;
                lanes[2][lane] += q * q;
                lanes[3][lane] += d;
                lanes[4][lane] += d * q;
            }
        }
        let [error, q, qq, d, dq] = lanes.map(|lanes| lanes.iter().sum());
        Sums { error, q, qq, d, dq }
    }

    /// The line of least squares through these elements, where they are not all the same.
    fn line(&self, bias: f32) -> Option<(f32, f32)> {
        let count = GROUP_SIZE as f32;
        let spread = count * self.qq - self.q * self.q;
        let scale = (count * self.dq - self.q * self.d) / spread;
        let usable = scale.is_normal() && bf16::from_f32(scale).to_f32().is_normal();
        usable.then(|| (scale, bias + (self.d - scale * self.q) / count))
    }
}
