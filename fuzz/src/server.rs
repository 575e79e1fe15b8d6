//! The whole server in this process, over a [`Device`] that writes what it is told to.

use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Request, header};
use lily_engine::engine::{Engine, EngineOptions};
use lily_model::checkpoint::Checkpoint;
use lily_model::tokenizer::Tokenizer;
use lily_server::app::App;
use lily_server::auth::Keys;
use lily_server::chat_model::{ChatModel, unix_time};
use lily_server::gate::Gate;
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;

use super::device::{Device, Script};

/// Tokens that prompt and answer may hold together.
const CONTEXT: usize = 4096;

/// The server.
pub struct Server {
    runtime: Runtime,
    router: Router,
    script: Script,
    /// The demo's.
    pub tokenizer: Tokenizer,
    /// The token of each single byte.
    pub byte_tokens: Vec<u32>,
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// Whether it is a stream of events.
    pub streamed: bool,
    /// All of it.
    pub body: Bytes,
}

/// The one server, which answers one request after the other.
pub fn server() -> MutexGuard<'static, Server> {
    static SERVER: LazyLock<Mutex<Server>> = LazyLock::new(|| Mutex::new(Server::new()));
    SERVER.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    fn new() -> Server {
        let checkpoint = Checkpoint::demo().expect("the demo is there");
        let tokenizer = checkpoint.tokenizer().expect("the demo has a tokenizer");
        let defaults = checkpoint.generation_config();
        let end = *defaults.eos_token_ids.first().expect("the demo names the end of a turn");
        let script = Script::default();
        let device = Device::new(tokenizer.vocab_size(), CONTEXT, end, script.clone());
        let options =
            EngineOptions { eos_token_ids: defaults.eos_token_ids.clone(), ..EngineOptions::default() };
        let model = ChatModel {
            name: checkpoint.name().to_string(),
            created: unix_time(),
            engine: Engine::start(Box::new(device), tokenizer.clone(), options),
            tokenizer: tokenizer.clone(),
            template: checkpoint.chat_template().expect("the demo has a chat template"),
            defaults,
            think: true,
            turns: Default::default(),
            recorder: Default::default(),
        };
        let gate = Gate::default();
        gate.open(App {
            model,
            keys: Keys::default(),
            limits: Default::default(),
            responses: Default::default(),
        });
        let runtime = Builder::new_current_thread().enable_time().build().expect("the system has threads");
        let mut byte_tokens = vec![end; 256];
        for id in 0..tokenizer.vocab_size() as u32 {
            if let Some([byte]) = tokenizer.token_bytes(id).as_deref() {
                byte_tokens[usize::from(*byte)] = id;
            }
        }
        Server { runtime, router: gate.service(&[]), script, tokenizer, byte_tokens }
    }

    /// Sends `body` to `path`, and has the device answer with `script`.
    pub fn post(&self, path: &str, body: Vec<u8>, script: Vec<u32>) -> Answer {
        self.script.set(script);
        self.send(Request::post(path).body(Body::from(body)).expect("the paths here are paths"))
    }

    /// What is at `path`.
    pub fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Body::empty()).expect("the paths here are paths"))
    }

    fn send(&self, request: Request<Body>) -> Answer {
        self.runtime.block_on(async {
            let Ok(response) = self.router.clone().oneshot(request).await;
            let status = response.status().as_u16();
            let kind = response.headers().get(header::CONTENT_TYPE);
            let streamed = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
            let body = to_bytes(response.into_body(), usize::MAX).await;
            Answer { status, streamed, body: body.expect("the server does not break off") }
        })
    }
}
