//! Tokens chosen on the GPU as a request asks: what `kernels/sample.metal` needs of a sequence.
//!
//! A sequence that asks for more than the greedy token has a [`Recipe`] in the GPU's memory, which the kernels advance
//! themselves. It is written in memory of its own and copied to its place at the beginning of the next pass, in the
//! order of all else, so that nobody waits for a pass that is under way.

use lily_engine::backend::BackendError;
use lily_engine::meter::{Charge, Meter};
use lily_engine::sampler::{SamplerState, SamplingParams};
use lily_gpu::sampling::{BINS, NONE, RECIPE_BYTES, table_bytes};

use crate::device::{Buffer, Device, Transfer};
use crate::error::DeviceError;
use crate::pool::{Pool, Unit};

const WHAT: &str = "the sampling tables of a sequence";
/// Units that the pools begin with.
const FIRST: usize = 2;
/// The weight of the most probable token, and bins of the histogram for a factor of e.
const ONE: f64 = (1u64 << 44) as f64;
const BINS_PER_E: f64 = 64.0;

/// In place of a token: a logit is NaN or infinite, or none is left to choose from.
pub const BROKEN: u32 = 0xffff_fffe;

/// Recipes and tables.
#[derive(Debug)]
pub struct Recipes<D: Device> {
    vocab: usize,
    recipes: Pool<D>,
    tables: Pool<D>,
}

/// How a sequence's tokens are chosen.
#[derive(Debug)]
pub struct Recipe {
    unit: Unit,
    counts: Option<Unit>,
    bias: Option<Unit>,
    _charge: Charge,
}

impl<D: Device> Recipes<D> {
    /// For a model of `vocab` tokens, with room for `limit` bytes.
    pub fn new(device: &D, vocab: usize, limit: u64) -> Result<Recipes<D>, DeviceError> {
        let pool = |label, bytes| Pool::new(device, label, bytes, FIRST, limit);
        Ok(Recipes {
            vocab,
            recipes: pool("recipes", RECIPE_BYTES)?,
            tables: pool("tables", table_bytes(vocab))?,
        })
    }

    /// Writes `state` down; the copies that this takes are put behind `transfers`.
    ///
    /// # Errors
    /// No memory on the device, or none left on `meter`.
    pub fn add(
        &mut self,
        device: &D,
        meter: &Meter,
        state: &SamplerState,
        transfers: &mut Vec<Transfer<D::Buffer>>,
    ) -> Result<Recipe, BackendError> {
        let SamplerState { params, counts, random } = state;
        let is_penalized = params.repetition_penalty != 1.0
            || params.presence_penalty != 0.0
            || params.frequency_penalty != 0.0;
        let counts =
            is_penalized.then(|| table(self.vocab, counts.iter().map(|&(token, count)| (token, count + 1))));
        let bias = params.logit_bias.iter().map(|&(token, bias)| (token, bias.to_bits()));
        let bias = (!params.logit_bias.is_empty()).then(|| table(self.vocab, bias));

        let tables = usize::from(counts.is_some()) + usize::from(bias.is_some());
        let bytes = RECIPE_BYTES + tables * table_bytes(self.vocab);
        let charge = meter.charge(WHAT, bytes)?;
        let failed = |error: DeviceError| error.while_for(WHAT, bytes);
        let mut place = |table: &Option<Vec<u8>>| match table {
            Some(_) => self.tables.take(device, transfers).map(Some).map_err(failed),
            None => Ok(None),
        };
        let (counts_unit, bias_unit) = (place(&counts)?, place(&bias)?);
        let unit = self.recipes.take(device, transfers).map_err(failed)?;
        let number = |unit: &Option<Unit>| unit.as_ref().map_or(NONE, Unit::number);
        let head = head(params, random, self.vocab, number(&counts_unit), number(&bias_unit));

        let staged = device.allocate(WHAT, bytes).map_err(failed)?;
        let mut from_offset = 0;
        let mut copy = |bytes: &[u8], pool: &Pool<D>, unit: &Unit| {
            staged.write(from_offset, bytes);
            let (to, to_offset) = (pool.buffer().clone(), pool.offset(unit));
            transfers.push(Transfer::Copy {
                from: staged.clone(),
                from_offset,
                to,
                to_offset,
                bytes: bytes.len(),
            });
            from_offset += bytes.len();
        };
        copy(&head, &self.recipes, &unit);
        for (table, unit) in [(&counts, &counts_unit), (&bias, &bias_unit)] {
            if let (Some(table), Some(unit)) = (table, unit) {
                copy(table, &self.tables, unit);
            }
        }
        Ok(Recipe { unit, counts: counts_unit, bias: bias_unit, _charge: charge })
    }

    /// The buffer that all recipes are in, until one more is added.
    pub fn recipes(&self) -> &D::Buffer {
        self.recipes.buffer()
    }

    /// The same for the tables.
    pub fn tables(&self) -> &D::Buffer {
        self.tables.buffer()
    }

    /// Where a recipe begins in its buffer.
    pub fn recipe_at(&self, recipe: &Recipe) -> usize {
        self.recipes.offset(&recipe.unit)
    }

    /// Where its tables begin in theirs.
    pub fn tables_at(&self, recipe: &Recipe) -> impl Iterator<Item = usize> {
        recipe.counts.iter().chain(&recipe.bias).map(|unit| self.tables.offset(unit))
    }

    /// Bytes of a table.
    pub fn table_bytes(&self) -> usize {
        self.tables.unit()
    }
}

impl Recipe {
    /// Its number.
    pub fn number(&self) -> u32 {
        self.unit.number()
    }
}

/// A u32 for each token, 0 where `entries` do not have it.
fn table(vocab: usize, entries: impl Iterator<Item = (u32, u32)>) -> Vec<u8> {
    let mut words = vec![0; vocab];
    for (token, word) in entries {
        if let Some(place) = words.get_mut(token as usize) {
            *place = word;
        }
    }
    words.iter().flat_map(|word: &u32| word.to_le_bytes()).collect()
}

/// `struct Recipe` of `kernels/sample.metal`.
fn head(
    params: &SamplingParams,
    random: &[u64; 4],
    vocab: usize,
    counts: u32,
    bias: u32,
) -> [u8; RECIPE_BYTES] {
    let temperature = f64::from(params.temperature);
    let inverse = if params.is_greedy() { 0.0 } else { 1.0 / temperature };
    let least = (f64::from(params.min_p) * ONE) as u64;
    let floats = [params.top_p, params.repetition_penalty, params.presence_penalty, params.frequency_penalty];
    let top_k = u32::try_from(params.top_k).ok().filter(|&top_k| (top_k as usize) < vocab).unwrap_or(0);
    let per_unit = ((BINS_PER_E * inverse) as f32).min(f32::MAX);

    let mut bytes = Vec::with_capacity(RECIPE_BYTES);
    bytes.extend([inverse.to_bits(), least].iter().chain(random).flat_map(|word| word.to_le_bytes()));
    bytes.extend(floats.iter().flat_map(|float| float.to_le_bytes()));
    let words = [top_k, counts, bias, per_unit.to_bits(), bins(params, least)];
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    bytes.resize(RECIPE_BYTES, 0);
    bytes.try_into().expect("the fields fit")
}

/// Bins of the histogram, from the largest logit on, that hold all tokens whose weights count. What lies in the last is
/// e^-31.9 of the largest and weighs nothing. Without `top_p` nobody asks for the weight of what `min_p` takes away. The kernels
/// find a bin in f32, which is off by less than one.
fn bins(params: &SamplingParams, least: u64) -> u32 {
    let last = BINS as f64 - 1.0;
    let bins = if params.top_p < 1.0 || least == 0 {
        last
    } else {
        ((ONE / (least as f64 - 0.5)).ln() * BINS_PER_E).floor() + 2.0
    };
    bins.min(last) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_is_laid_out_as_the_kernels_read_it() {
        let params = SamplingParams { temperature: 0.5, top_p: 0.9, top_k: 40, ..SamplingParams::default() };
        let bytes = head(&params, &[1, 2, 3, 4], 1000, 5, 6);
        let words: Vec<u64> = bytes[..48].as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        assert_eq!(words, [2f64.to_bits(), 0, 1, 2, 3, 4]);
        let halves: Vec<u32> =
            bytes[48..].as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let [top_p, one, per_unit] = [0.9f32, 1.0, 128.0].map(f32::to_bits);
        assert_eq!(halves, [top_p, one, 0, 0, 40, 5, 6, per_unit, 2047, 0, 0, 0]);
    }

    #[test]
    fn what_min_p_takes_away_is_not_looked_at_where_nobody_asks_for_its_weight() {
        let bins = |min_p: f32, top_p: f32| {
            let params = SamplingParams { min_p, top_p, ..SamplingParams::default() };
            bins(&params, (f64::from(min_p) * ONE) as u64)
        };
        assert_eq!([bins(0.0, 1.0), bins(0.5, 0.9), bins(1e-30, 1.0)], [2047; 3]);
        // e^-3 lies in bin 191 or 192.
        assert_eq!([bins(1.0, 1.0), bins((-3.0f32).exp(), 1.0)], [2, 194]);
    }

    #[test]
    fn kernels_and_host_have_the_same_constants() {
        let source = include_str!("../kernels/sample.metal");
        for constant in [
            format!("BROKEN = {BROKEN:#x}u;"),
            format!("NONE = {NONE:#x}u;"),
            format!("BINS = {BINS};"),
            format!("LIST = {};", lily_gpu::sampling::LIST),
            format!("THREADS = {};", lily_gpu::sampling::THREADS),
            format!("sizeof(Recipe) == {RECIPE_BYTES}"),
        ] {
            assert!(source.contains(&constant), "{constant}");
        }
        let part = lily_gpu::sampling::THREADS * 8;
        assert!(source.contains("EACH = 8;") && lily_gpu::sampling::parts(part as usize + 1) == 2);
    }
}
