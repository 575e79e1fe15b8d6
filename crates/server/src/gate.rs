//! What stands before the router: there while the model is loading, and around every request afterwards.
//!
//! The server listens before it has a model, because loading one can take a minute and whoever watches over it
//! wants to know that it is coming. [`Gate::open`] puts the [`App`] in; until then `/health` answers `loading`
//! and everything else is asked to come back.
//!
//! From the outside in, every request passes: cross-origin rules, its name, the shape of errors, the log of refusals, and a
//! wall that turns a panic into an answer with status 500.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use lily_engine::engine::Engine;
use tower::ServiceExt;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::anthropic;
use crate::app::{App, router, wrong_method};
use crate::error::ApiError;
use crate::{health, openapi, page, request_id};

/// See the module's page. Clones are the same gate.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<OnceLock<Loaded>>);

#[derive(Debug)]
struct Loaded {
    router: Router,
    engine: Engine,
}

impl Gate {
    /// Lets requests through to `app`. The first one stays.
    pub fn open(&self, app: App) {
        let engine = app.model.engine.clone();
        self.0.get_or_init(|| Loaded { router: router(app), engine });
    }

    /// The engine behind it, once there is one.
    pub fn engine(&self) -> Option<&Engine> {
        self.0.get().map(|loaded| &loaded.engine)
    }

    /// The whole server as one service, for a listener or for a test. Pages of the web may read its answers where
    /// they come from one of `origins`; `*` is all.
    pub fn service(self, origins: &[HeaderValue]) -> Router {
        Router::new()
            .route(page::PATH, get(page::page).fallback(wrong_method))
            .route(openapi::PATH, get(openapi::document).fallback(wrong_method))
            .fallback(pass)
            .with_state(self)
            .layer(CatchPanicLayer::custom(panicked))
            .layer(middleware::from_fn(log_refusal))
            .layer(middleware::from_fn(anthropic::error::reshape))
            .layer(middleware::from_fn(request_id::name))
            .layer(cors(origins))
    }
}

async fn pass(State(gate): State<Gate>, request: Request) -> Response {
    match gate.0.get() {
        Some(loaded) => match loaded.router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        },
        None if request.uri().path() == health::PATH => health::loading(),
        None => {
            let message = "the model is still loading; GET /health says when it is ready";
            ApiError::plain(StatusCode::SERVICE_UNAVAILABLE, "loading", message).into_response()
        }
    }
}

/// The answer to a request whose handler panicked; what it held is dropped, and other requests notice nothing.
fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    tracing::error!(message, "a request panicked; please report this");
    ApiError::internal("the server failed at this request; please report it").into_response()
}

/// Writes a line for each request that was answered with an error. Its message may hold words of the request and
/// stays out.
async fn log_refusal(request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = next.run(request).await;
    if let Some(error) = response.extensions().get::<ApiError>() {
        let (status, code, field) = (error.status.as_u16(), error.code, error.param.as_deref());
        if error.status.is_server_error() {
            tracing::warn!(%method, path, status, code, reason = error.message, "failed");
        } else {
            tracing::info!(%method, path, status, code, field, "refused");
        }
    }
    response
}

fn cors(origins: &[HeaderValue]) -> CorsLayer {
    let all = origins.iter().any(|origin| origin == "*");
    CorsLayer::new()
        .allow_origin(if all { AllowOrigin::any() } else { AllowOrigin::list(origins.iter().cloned()) })
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        // `*` would not cover `Authorization`.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER])
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};

    use super::*;

    async fn ask(service: Router, path: &str) -> (StatusCode, String) {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        let response = service.oneshot(request).await.unwrap();
        let status = response.status();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn while_the_model_loads_health_says_so_and_everything_else_is_to_come_back() {
        let service = Gate::default().service(&[]);
        let (status, body) = ask(service.clone(), "/health").await;
        assert_eq!((status, body.as_str()), (StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"loading"}"#));
        let (status, body) = ask(service.clone(), "/v1/models").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(body.contains("\"code\":\"loading\""), "{body}");
        let (status, body) = ask(service, "/v1/messages").await;
        assert_eq!(status.as_u16(), 529);
        assert!(body.contains("overloaded_error"), "{body}");
    }

    #[tokio::test]
    async fn a_request_that_panics_is_answered_and_the_next_one_is_served() {
        async fn handler() -> &'static str {
            panic!("a bug")
        }
        let service = Router::new()
            .route("/bug", get(handler))
            .route("/fine", get(|| async { "fine" }))
            .layer(CatchPanicLayer::custom(panicked));
        let (status, body) = ask(service.clone(), "/bug").await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(body.contains("server_error") && !body.contains("a bug"), "{body}");
        assert_eq!(ask(service, "/fine").await, (StatusCode::OK, "fine".to_string()));
    }
}
