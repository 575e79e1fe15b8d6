//! `GET /metrics`: figures in Prometheus' text format.
//!
//! The names are vLLM's, so that its dashboards and the gateways that balance by them work unchanged; every one
//! carries the label `model_name`. Times are the engine's own: a slow reader does not make them worse. Totals of
//! tokens and what is held in memory are read from the engine when somebody asks; the rest is counted as it
//! happens.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use lily_engine::engine::{Engine, FinishReason};
use prometheus::{
    Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TEXT_FORMAT, TextEncoder,
};

use crate::answer::End;
use crate::app::App;
use crate::error::ApiError;
use crate::openapi;

/// Upper bounds in seconds of the time between two tokens.
const GAPS: [f64; 19] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 20.0,
];
/// Upper bounds in seconds of the time to a first token.
const FIRST_TOKENS: [f64; 20] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 80.0,
    160.0, 640.0,
];
/// Upper bounds in seconds of the parts of a request and of the whole.
const REQUESTS: [f64; 20] = [
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 480.0,
    1920.0, 7680.0,
];
/// Upper bounds of tokens in a prompt or an answer.
const TOKENS: [f64; 18] =
    [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 262_144.0];

/// The label that says which model is served.
const MODEL: &str = "model_name";
/// The label that says how requests ended.
const FINISH: &str = "finished_reason";
/// Every way to end, so that each is there from the beginning, as zero.
const FINISHES: [&str; 4] = ["stop", "length", "abort", "error"];

/// The figures of one server. Clones are the same figures.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Families>);

#[derive(Debug)]
struct Families {
    registry: Registry,
    /// Held while the engine's figures are taken over, so that two askers do not both add a difference.
    taking_over: Mutex<()>,
    running: IntGauge,
    waiting: IntGauge,
    cache_usage: Gauge,
    state: IntGaugeVec,
    snapshots: IntGauge,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    cache_queries: IntCounter,
    cache_hits: IntCounter,
    preemptions: IntCounter,
    evicted: IntCounter,
    finished: IntCounterVec,
    first_token: Histogram,
    gap: Histogram,
    gap_by_its_old_name: Histogram,
    mean_gap: Histogram,
    whole: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    prompt_length: Histogram,
    answer_length: Histogram,
}

/// Makes figures of one model and puts them into the registry.
struct Maker {
    registry: Registry,
    model: String,
}

impl Maker {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label(MODEL, &self.model)
    }

    fn keep<T: prometheus::core::Collector + Clone + 'static>(
        &self,
        figure: prometheus::Result<T>,
    ) -> prometheus::Result<T> {
        let figure = figure?;
        self.registry.register(Box::new(figure.clone()))?;
        Ok(figure)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        self.keep(IntCounter::with_opts(self.opts(name, help)))
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.keep(IntGauge::with_opts(self.opts(name, help)))
    }

    fn histogram(&self, name: &str, help: &str, bounds: &[f64]) -> prometheus::Result<Histogram> {
        let opts = HistogramOpts::new(name, help).const_label(MODEL, &self.model).buckets(bounds.to_vec());
        self.keep(Histogram::with_opts(opts))
    }
}

impl Metrics {
    /// The figures of the model that clients call `model`, all zero.
    ///
    /// # Errors
    /// None that a model's name could cause; the library reports names that are wrong or taken.
    pub fn new(model: &str) -> prometheus::Result<Metrics> {
        let make = Maker { registry: Registry::new(), model: model.to_string() };
        let finished = make.opts("vllm:request_success_total", "Requests that ended, by how.");
        let state = make.opts("lily:state_bytes", "Bytes of state of requests and of the prefix cache.");
        let gap_help = "Time between two tokens of an answer in seconds.";
        let families = Families {
            running: make.gauge("vllm:num_requests_running", "Requests that have a place.")?,
            waiting: make.gauge("vllm:num_requests_waiting", "Requests that wait for a place.")?,
            cache_usage: make.keep(Gauge::with_opts(make.opts(
                "vllm:kv_cache_usage_perc",
                "Part of the memory for state that running requests hold, 1 being all; the prefix cache gives way and does not count.",
            )))?,
            state: make.keep(IntGaugeVec::new(state, &["holder"]))?,
            snapshots: make.gauge("lily:prefix_cache_snapshots", "Snapshots that the prefix cache holds.")?,
            prompt_tokens: make.counter("vllm:prompt_tokens_total", "Tokens of prompts that were begun.")?,
            generation_tokens: make.counter("vllm:generation_tokens_total", "Tokens generated.")?,
            cache_queries: make.counter(
                "vllm:prefix_cache_queries_total",
                "Tokens of prompts that were looked for in the prefix cache.",
            )?,
            cache_hits: make.counter("vllm:prefix_cache_hits_total", "Tokens that the prefix cache had.")?,
            preemptions: make.counter(
                "vllm:num_preemptions_total",
                "Times that a request gave its memory to older ones.",
            )?,
            evicted: make.counter(
                "lily:prefix_cache_evictions_total",
                "Snapshots that the prefix cache let go of.",
            )?,
            finished: make.keep(IntCounterVec::new(finished, &[FINISH]))?,
            first_token: make.histogram(
                "vllm:time_to_first_token_seconds",
                "Time from a request to its first token in seconds.",
                &FIRST_TOKENS,
            )?,
            gap: make.histogram("vllm:inter_token_latency_seconds", gap_help, &GAPS)?,
            gap_by_its_old_name: make.histogram("vllm:time_per_output_token_seconds", gap_help, &GAPS)?,
            mean_gap: make.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time between two tokens of one answer in seconds.",
                &GAPS,
            )?,
            whole: make.histogram(
                "vllm:e2e_request_latency_seconds",
                "Time from a request to the end of its answer in seconds.",
                &REQUESTS,
            )?,
            queue: make.histogram(
                "vllm:request_queue_time_seconds",
                "Time that a request waited for a place in seconds.",
                &REQUESTS,
            )?,
            prefill: make.histogram(
                "vllm:request_prefill_time_seconds",
                "Time from a place to the first token in seconds.",
                &REQUESTS,
            )?,
            decode: make.histogram(
                "vllm:request_decode_time_seconds",
                "Time from the first token to the last in seconds.",
                &REQUESTS,
            )?,
            inference: make.histogram(
                "vllm:request_inference_time_seconds",
                "Time from a place to the last token in seconds.",
                &REQUESTS,
            )?,
            prompt_length: make.histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", &TOKENS)?,
            answer_length: make.histogram(
                "vllm:request_generation_tokens",
                "Tokens of an answer.",
                &TOKENS,
            )?,
            registry: make.registry,
            taking_over: Mutex::new(()),
        };
        FINISHES.iter().for_each(|finish| families.finished.with_label_values(&[finish]).inc_by(0));
        Ok(Metrics(Arc::new(families)))
    }

    /// An answer's first token came `after` its request.
    pub fn first_token(&self, after: Duration) {
        self.0.first_token.observe(after.as_secs_f64());
    }

    /// Another token came, `gap` after the one before it.
    pub fn next_token(&self, gap: Duration) {
        self.0.gap.observe(gap.as_secs_f64());
        self.0.gap_by_its_old_name.observe(gap.as_secs_f64());
    }

    /// An answer came to its end.
    pub fn ended(&self, end: &End) {
        let figures = &*self.0;
        let (usage, timings) = (end.usage, end.timings);
        figures.queue.observe(timings.queue.as_secs_f64());
        figures.prefill.observe(timings.prefill.as_secs_f64());
        figures.decode.observe(timings.decode.as_secs_f64());
        figures.inference.observe((timings.prefill + timings.decode).as_secs_f64());
        figures.whole.observe((end.first_token() + timings.decode).as_secs_f64());
        figures.prompt_length.observe(usage.prompt_tokens as f64);
        figures.answer_length.observe(usage.completion_tokens as f64);
        if usage.completion_tokens > 1 {
            figures.mean_gap.observe(1.0 / end.decode_rate());
        }
        self.finished(match end.reason {
            FinishReason::EndOfSequence | FinishReason::StopString => "stop",
            FinishReason::Length => "length",
        });
    }

    /// An answer ended as `finish` says, one of `stop`, `length`, `abort` and `error`.
    pub fn finished(&self, finish: &'static str) {
        self.0.finished.with_label_values(&[finish]).inc();
    }

    /// All figures as text, those of `engine` as they are now.
    ///
    /// # Errors
    /// None that can be provoked from outside; the library reports figures without a name.
    pub fn text(&self, engine: &Engine) -> prometheus::Result<String> {
        let figures = &*self.0;
        let _alone = figures.taking_over.lock().unwrap_or_else(PoisonError::into_inner);
        let (load, stats) = (engine.load(), engine.stats());
        figures.running.set(signed(load.running as u64));
        figures.waiting.set(signed(load.waiting as u64));
        let memory = stats.memory;
        let requests = memory.used.saturating_sub(memory.snapshots);
        figures.cache_usage.set(requests as f64 / memory.limit.max(1) as f64);
        figures.state.with_label_values(&["requests"]).set(signed(requests));
        figures.state.with_label_values(&["prefix_cache"]).set(signed(memory.snapshots));
        figures.snapshots.set(signed(stats.cache.snapshots as u64));
        for (counter, total) in [
            (&figures.prompt_tokens, stats.prompt_tokens),
            (&figures.cache_queries, stats.prompt_tokens),
            (&figures.cache_hits, stats.cached_tokens),
            (&figures.generation_tokens, stats.generated_tokens),
            (&figures.preemptions, stats.gave_way),
            (&figures.evicted, stats.cache.evicted),
        ] {
            counter.inc_by(total.saturating_sub(counter.get()));
        }
        TextEncoder::new().encode_to_string(&figures.registry.gather())
    }
}

/// Gauges are signed; no count or size here comes near the difference.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Figures for Prometheus.
#[utoipa::path(
    get, path = "/metrics", tag = "Server",
    responses(
        (status = 200, description = "Prometheus' text format.", body = String, content_type = "text/plain"),
        openapi::Watched,
    ),
)]
pub async fn metrics(State(app): State<App>) -> Result<Response, ApiError> {
    let Some(metrics) = &app.model.recorder.metrics else {
        return Err(ApiError::internal("this server keeps no figures"));
    };
    let text = metrics.text(&app.model.engine).map_err(|error| ApiError::internal(error.to_string()))?;
    Ok(([(CONTENT_TYPE, TEXT_FORMAT)], text).into_response())
}
