//! A listener around the router, from the first connection to a clean end.

use std::future::Future;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::app::{App, router};

/// How long answers that are under way may go on once the server was asked to stop.
const GRACE: Duration = Duration::from_secs(10);

/// Serves until `stop` completes, then lets answers under way finish for ten seconds, and cancels the
/// rest.
pub async fn serve(
    listener: TcpListener,
    app: App,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let engine = app.model.engine.clone();
    let (stopping, mut stopped) = watch::channel(false);
    let signal = async move {
        stop.await;
        // The receiver lives until this function returns.
        let _ = stopping.send(true);
    };
    let server = axum::serve(listener, router(app)).with_graceful_shutdown(signal);
    let deadline = async {
        // An error means that the sender is gone, which is when the server has ended anyway.
        let _ = stopped.wait_for(|&stopped| stopped).await;
        tokio::time::sleep(GRACE).await;
    };
    let outcome = tokio::select! {
        outcome = server => outcome,
        () = deadline => Ok(()),
    };
    // Whatever still runs has had its time.
    let ended = tokio::task::spawn_blocking(move || engine.shutdown(Duration::ZERO)).await;
    outcome.and(ended.map_err(std::io::Error::other))
}
