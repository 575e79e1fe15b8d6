//! A listener around the gate, from the first connection to a clean end.

use std::future::Future;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};

use crate::gate::Gate;

/// How long connections may wait and ends may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// The longest that a request's head may take to arrive, and so the longest that a connection is kept without
    /// one.
    pub header_time: Duration,
    /// How long answers that are under way may go on once the server was asked to stop.
    pub grace: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { header_time: Duration::from_secs(30), grace: Duration::from_secs(10) }
    }
}

/// How long streams that were cancelled may take to say so to their clients.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Serves until `stop` completes, then lets answers under way finish for [`Patience::grace`], and cancels the
/// rest. `service` is [`Gate::service`] of `gate`.
///
/// # Errors
/// When the engine's thread cannot be waited for.
pub async fn serve(
    mut listener: TcpListener,
    gate: Gate,
    service: Router,
    patience: Patience,
    stop: impl Future<Output = ()>,
) -> std::io::Result<()> {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(patience.header_time);
    let connections = GracefulShutdown::new();
    let accept = async {
        loop {
            // Errors are waited out in there.
            let (stream, _) = Listener::accept(&mut listener).await;
            connect(&http, stream, &service, &connections);
        }
    };
    tokio::select! {
        () = accept => {}
        () = stop => {}
    }
    drop(listener);
    // Whatever still runs after that has had its time.
    let mut answered = std::pin::pin!(connections.shutdown());
    let in_time = tokio::time::timeout(patience.grace, &mut answered).await.is_ok();
    let Some(engine) = gate.engine().cloned() else { return Ok(()) };
    let ended = tokio::task::spawn_blocking(move || engine.shutdown(Duration::ZERO)).await;
    if !in_time {
        // Those who were cut off are still to be told so.
        let _ = tokio::time::timeout(LAST_WORDS, answered).await;
    }
    ended.map_err(std::io::Error::other)
}

fn connect(http: &http1::Builder, stream: TcpStream, service: &Router, connections: &GracefulShutdown) {
    // A token is a small packet that somebody waits for.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection keeps its delay");
    }
    let service = TowerToHyperService::new(service.clone());
    let connection = connections.watch(http.serve_connection(TokioIo::new(stream), service));
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection ended early");
        }
    });
}
