//! The sampler against a slow, obvious version of the same definition.

use proptest::prelude::*;

use super::random::Random;
use super::*;

/// The definition at the top of [`crate::sampler`], by sorting everything and summing in f64.
fn slow(params: &SamplingParams, prompt: &[u32], answer: &[u32], logits: &[f32], uniform: f64) -> u32 {
    let mut row: Vec<f32> = logits.to_vec();
    for &(token, bias) in &params.logit_bias {
        row[token as usize] += bias;
    }
    for (token, logit) in (0..).zip(row.iter_mut()) {
        let count = answer.iter().filter(|&&t| t == token).count();
        if count > 0 || prompt.contains(&token) {
            if *logit > 0.0 {
                *logit /= params.repetition_penalty;
            } else {
                *logit *= params.repetition_penalty;
            }
        }
        if count > 0 {
            *logit -= count as f32 * params.frequency_penalty;
            *logit -= params.presence_penalty;
        }
    }
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap().then(a.cmp(&b)));
    if params.temperature == 0.0 {
        return order[0] as u32;
    }
    let max = row[order[0]] as f64;
    let weight = |i: usize| ((row[i] as f64 - max) / params.temperature as f64).exp();
    if params.top_k > 0 {
        order.truncate(params.top_k);
    }
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let mut mass = 0.0;
    let mut kept = Vec::new();
    for &i in &order {
        if kept.is_empty() || mass < params.top_p as f64 * total {
            kept.push(i);
        }
        mass += weight(i);
    }
    kept.retain(|&i| weight(i) >= params.min_p as f64);
    kept.sort();
    let total: f64 = kept.iter().map(|&i| weight(i)).sum();
    let mut mass = 0.0;
    for &i in &kept {
        mass += weight(i);
        if mass > uniform * total {
            return i as u32;
        }
    }
    *kept.last().unwrap() as u32
}

/// A number in [0, 1) from a draw.
fn uniform(random: &mut Random) -> f64 {
    random.next() as f64 / (1u64 << f64::MANTISSA_DIGITS) as f64
}

/// Rows with ties, forbidden tokens and every scale; the first token is always allowed.
fn rows() -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![
        4 => -20.0f32..20.0,
        4 => (-12i32..12).prop_map(|quarters| quarters as f32 / 4.0),
        1 => Just(f32::NEG_INFINITY),
        1 => Just(-0.0f32),
    ];
    prop::collection::vec(logit, 1..400).prop_map(|mut row| {
        row[0] = if row[0].is_finite() { row[0] } else { 1.5 };
        row
    })
}

fn params(vocab: u32) -> impl Strategy<Value = SamplingParams> {
    let off_or = |off: f32, range: std::ops::Range<f32>| prop_oneof![Just(off), range];
    (
        (off_or(0.0, 0.05..3.0), prop_oneof![Just(0usize), 1usize..500]),
        (off_or(1.0, 0.0..1.0), off_or(0.0, 0.0..1.0)),
        (off_or(1.0, 0.5..2.0), off_or(0.0, -2.0..2.0), off_or(0.0, -2.0..2.0)),
        prop::collection::vec((0..vocab, -100.0f32..100.0), 0..3),
        any::<u64>(),
    )
        .prop_map(|((temperature, top_k), (top_p, min_p), penalties, logit_bias, seed)| SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty: penalties.0,
            presence_penalty: penalties.1,
            frequency_penalty: penalties.2,
            logit_bias,
            seed: Some(seed),
            logprobs: None,
        })
}

fn cases() -> impl Strategy<Value = (Vec<f32>, SamplingParams, Vec<u32>)> {
    rows().prop_flat_map(|row| {
        let vocab = row.len() as u32;
        (Just(row), params(vocab), prop::collection::vec(0..vocab, 0..20))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn it_chooses_what_the_slow_definition_chooses((row, params, prompt) in cases()) {
        params.validate(row.len()).unwrap();
        let mut sampler = Sampler::new(params.clone(), &prompt);
        let mut random = Random::new(params.seed.unwrap());
        let mut answer = Vec::new();
        for _ in 0..6 {
            let uniform = if params.is_greedy() { 0.0 } else { uniform(&mut random) };
            let expected = slow(&params, &prompt, &answer, &row, uniform);
            let sampled = sampler.sample(&mut row.clone()).unwrap();
            prop_assert_eq!(sampled.token, expected);
            answer.push(sampled.token);
        }
    }

    #[test]
    fn a_sampler_goes_on_from_its_state_wherever_it_is((row, params, prompt) in cases(), turns in 0usize..6) {
        let mut here = Sampler::new(params, &prompt);
        (0..turns).for_each(|_| drop(here.sample(&mut row.clone())));
        let Some(state) = here.state() else { return Ok(()) };
        let mut there = Sampler::resume(state);
        for _ in 0..6 {
            let token = there.sample(&mut row.clone()).unwrap().token;
            here.follow(token);
            prop_assert_eq!(here.state().map(sorted), there.state().map(sorted));
        }
    }

    #[test]
    fn logprobs_are_the_log_softmax_of_the_row_before_bias_and_filters(
        (row, params, prompt) in cases(),
        count in 0usize..=MAX_LOGPROBS,
    ) {
        let params = SamplingParams { logprobs: Some(count), ..params };
        let sampled = Sampler::new(params, &prompt).sample(&mut row.clone()).unwrap();
        let logprobs = sampled.logprobs.unwrap();

        let sum: f64 = row.iter().map(|&l| (l as f64).exp()).sum();
        let expected = |token: u32| row[token as usize] as f64 - sum.ln();
        let close = |got: f32, token| (got as f64 - expected(token)).abs() < 1e-5 * expected(token).abs().max(1.0);
        prop_assert!(close(logprobs.chosen, sampled.token));
        let mut order: Vec<u32> = (0..row.len() as u32).filter(|&t| row[t as usize].is_finite()).collect();
        order.sort_by(|&a, &b| row[b as usize].partial_cmp(&row[a as usize]).unwrap().then(a.cmp(&b)));
        order.truncate(count);
        prop_assert_eq!(logprobs.top.iter().map(|&(token, _)| token).collect::<Vec<_>>(), order);
        prop_assert!(logprobs.top.iter().all(|&(token, logprob)| close(logprob, token)));
    }

    #[test]
    fn no_row_of_floats_makes_it_panic(
        row in prop::collection::vec(prop::num::f32::ANY, 0..50),
        params in params(50),
        prompt in prop::collection::vec(any::<u32>(), 0..5),
    ) {
        let params = SamplingParams { logprobs: Some(5), ..params };
        let mut sampler = Sampler::new(params, &prompt);
        match sampler.sample(&mut row.clone()) {
            Ok(sampled) => prop_assert!(row[sampled.token as usize] > f32::NEG_INFINITY),
            Err(SampleError::NotFinite { token, value }) => {
                prop_assert_eq!(row[token as usize].to_bits(), value.to_bits());
                prop_assert!(!value.is_finite());
            }
            Err(SampleError::NoCandidate { vocab }) => prop_assert_eq!(vocab, row.len()),
        }
    }
}

/// A state whose counts are in order.
fn sorted(mut state: SamplerState) -> SamplerState {
    state.counts.sort_unstable();
    state
}

/// A vocabulary of the real size with one clear order, so that nucleus and top-k need no more than a glance.
#[test]
fn a_nucleus_wider_than_the_first_guess_is_found() {
    let row: Vec<f32> =
        (0..248_320u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32 * 1e-5).collect();
    let params = SamplingParams { temperature: 1.0, top_p: 0.5, seed: Some(1), ..SamplingParams::default() };
    let mut random = Random::new(1);
    let mut sampler = Sampler::new(params.clone(), &[]);
    for _ in 0..3 {
        let expected = slow(&params, &[], &[], &row, uniform(&mut random));
        assert_eq!(sampler.sample(&mut row.clone()).unwrap().token, expected);
    }
}

#[test]
fn many_draws_follow_the_softmax() {
    let probabilities = [0.5f32, 0.25, 0.15, 0.1];
    let row = probabilities.map(f32::ln);
    let params = SamplingParams { temperature: 1.0, seed: Some(3), ..SamplingParams::default() };
    let mut sampler = Sampler::new(params, &[]);
    let draws = 40_000;
    let mut counts = [0; 4];
    for _ in 0..draws {
        counts[sampler.sample(&mut row.clone()).unwrap().token as usize] += 1;
    }
    for (count, probability) in counts.iter().zip(probabilities) {
        let share = *count as f32 / draws as f32;
        assert!((share - probability).abs() < 0.01, "{share} of the draws for probability {probability}");
    }
}

/// Written down once: if this changes, every user's seeded texts change.
#[test]
fn a_seed_gives_the_same_tokens_for_ever() {
    let row: Vec<f32> = (0..100).map(|i| ((i * 37) % 100) as f32 / 25.0).collect();
    let params = SamplingParams { temperature: 0.8, seed: Some(42), ..SamplingParams::default() };
    let mut sampler = Sampler::new(params, &[]);
    let tokens: Vec<u32> = (0..12).map(|_| sampler.sample(&mut row.clone()).unwrap().token).collect();
    assert_eq!(tokens, [81, 32, 97, 70, 80, 56, 13, 59, 23, 91, 54, 83]);
}

#[test]
fn the_largest_logit_wins_and_the_lowest_id_among_equals() {
    let mut sampler = Sampler::new(SamplingParams::default(), &[]);
    assert_eq!(sampler.sample(&mut [0.5, 2.0, -1.0, 2.0]).unwrap().token, 1);
    assert_eq!(sampler.sample(&mut [-0.0, 0.0]).unwrap().token, 0);
}

#[test]
fn broken_rows_are_named() {
    let mut sampler = Sampler::new(SamplingParams::default(), &[]);
    let error = sampler.sample(&mut [1.0, f32::NAN, f32::INFINITY]).unwrap_err();
    assert_eq!(error.to_string(), "the logit of token 1 is NaN; the weights or the device are broken");
    let error = sampler.sample(&mut [f32::NEG_INFINITY; 3]).unwrap_err();
    assert_eq!(error, SampleError::NoCandidate { vocab: 3 });
}

#[test]
fn each_parameter_outside_its_range_is_refused_by_name() {
    let refused = |change: fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        change(&mut params);
        params.validate(1000).unwrap_err().to_string()
    };
    assert_eq!(
        refused(|p| p.temperature = -1.0),
        "temperature is -1; it must be a finite number of at least 0"
    );
    assert_eq!(
        refused(|p| p.temperature = f32::NAN),
        "temperature is NaN; it must be a finite number of at least 0"
    );
    assert_eq!(refused(|p| p.top_p = 1.5), "top_p is 1.5; it must be from 0 to 1");
    assert_eq!(refused(|p| p.min_p = -0.1), "min_p is -0.1; it must be from 0 to 1");
    assert_eq!(
        refused(|p| p.repetition_penalty = 0.0),
        "repetition_penalty is 0; it must be a finite number above 0"
    );
    assert_eq!(refused(|p| p.presence_penalty = 3.0), "presence_penalty is 3; it must be from -2 to 2");
    assert_eq!(refused(|p| p.frequency_penalty = -3.0), "frequency_penalty is -3; it must be from -2 to 2");
    assert_eq!(
        refused(|p| p.logit_bias = vec![(5, 101.0)]),
        "logit_bias is 101; it must be from -100 to 100 for every token"
    );
    assert_eq!(
        refused(|p| p.logit_bias = vec![(1000, 1.0)]),
        "logit_bias is for token 1000; it must be for tokens below 1000, the size of the vocabulary"
    );
    assert_eq!(refused(|p| p.logprobs = Some(21)), "logprobs is 21; it must be from 0 to 20");
    assert_eq!(SamplingParams::default().validate(1), Ok(()));
}
