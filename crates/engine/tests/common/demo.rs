//! The engine over the real CPU backend and the demo's weights.

use lily_cpu::{CpuBackend, CpuOptions};
use lily_engine::backend::Backend;
use lily_engine::engine::{CacheOptions, Engine, EngineOptions};
use lily_engine::prefix_cache::positions::TurnMarkers;
use lily_model::chat_template::{ChatInput, ChatTemplate};
use lily_model::checkpoint::Checkpoint;
use lily_model::tokenizer::{Tokenizer, markers};
use lily_model::weights::Weights;
use serde_json::{Map, Value};

/// The demo, loaded once.
pub struct Demo {
    pub weights: Weights,
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
    pub eos: Vec<u32>,
}

impl Demo {
    pub fn load() -> Demo {
        let checkpoint = Checkpoint::demo().unwrap();
        Demo {
            weights: checkpoint.weights().unwrap(),
            tokenizer: checkpoint.tokenizer().unwrap(),
            template: checkpoint.chat_template().unwrap(),
            eos: checkpoint.generation_config().eos_token_ids,
        }
    }

    /// A backend with `state_bytes` for state.
    pub fn backend(&self, state_bytes: usize) -> CpuBackend {
        let options = CpuOptions { state_bytes, ..CpuOptions::default() };
        CpuBackend::new(self.weights.clone(), options).unwrap()
    }

    /// A cache of `bytes` that knows the demo's turns.
    pub fn cache(&self, bytes: u64) -> CacheOptions {
        let markers = TurnMarkers {
            turn_start: self.tokenizer.token_id(markers::IM_START).unwrap(),
            tool_response: self.tokenizer.token_id("<tool_response>"),
        };
        CacheOptions { bytes, markers: Some(markers), ..CacheOptions::default() }
    }

    /// An engine over `backend`.
    pub fn engine(&self, backend: impl Backend + 'static, cache: CacheOptions) -> Engine {
        let options = EngineOptions { eos_token_ids: self.eos.clone(), cache, ..EngineOptions::default() };
        Engine::start(Box::new(backend), self.tokenizer.clone(), options)
    }

    /// The tokens of a conversation, ready for the model's turn.
    pub fn prompt(&self, messages: &[Value], tools: &[Value], thinking: bool) -> Vec<u32> {
        let input = ChatInput {
            messages,
            tools,
            add_generation_prompt: true,
            enable_thinking: Some(thinking),
            extra: Map::new(),
        };
        self.tokenizer.encode(&self.template.render(&input).unwrap())
    }
}
