//! Answers as server-sent events: where they go, and how a stream ends early.
//!
//! Each answer of a request is written by a task of its own into one bounded channel. All of them end as soon
//! as the client goes away, and their work with them.

use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use crate::answer::{Answer, News};

/// Between two events of a stream a sign of life goes out this often, so that no proxy or client takes a
/// long prefill for a dead connection.
pub const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Events that wait for a slow reader before the stream's task does.
const STREAM_BUFFER: usize = 32;

/// How long a reader may take nothing at all before it is taken for gone: a person may look away from a paused
/// terminal, a dead connection must not hold its place for ever.
const STALLED: Duration = Duration::from_secs(600);

/// Where a stream's events go.
pub type Events = mpsc::Sender<Result<Event, Interrupted>>;

/// Whoever wrote a stream panicked. The connection breaks off, which no client takes for the stream's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server failed while it wrote this stream")]
pub struct Interrupted;

/// Why a stream ends early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The client is gone; there is nobody to tell.
    Gone,
    /// The engine failed.
    Failed(String),
}

/// The response whose events `write` sends; `idle` goes out after every [`KEEP_ALIVE`] without one.
pub fn respond<F>(idle: Event, write: impl FnOnce(Events) -> F) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    respond_within(KEEP_ALIVE, idle, write)
}

/// As [`respond`], with `idle` after every `silence`.
pub(crate) fn respond_within<F>(silence: Duration, idle: Event, write: impl FnOnce(Events) -> F) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    let keep_alive = KeepAlive::new().interval(silence).event(idle);
    written(write).keep_alive(keep_alive).into_response()
}

/// The response whose events `write` sends, signs of life among them.
pub fn respond_as_written<F>(write: impl FnOnce(Events) -> F) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    written(write).into_response()
}

fn written<F>(write: impl FnOnce(Events) -> F) -> Sse<ReceiverStream<Result<Event, Interrupted>>>
where
    F: Future<Output = ()> + Send + 'static,
{
    let (events, receiver) = mpsc::channel(STREAM_BUFFER);
    let writer = tokio::spawn(write(events.clone()));
    tokio::spawn(async move {
        if let Err(error) = writer.await {
            tracing::error!(%error, "a stream broke off; please report this");
            // A client that is gone needs no message.
            let _ = events.send(Err(Interrupted)).await;
        }
    });
    Sse::new(ReceiverStream::new(receiver))
}

/// Adds a JSON body to an event, and sends it.
pub async fn send(events: &Events, event: Event, body: &impl Serialize) -> Result<(), Broken> {
    let event = event.json_data(body).map_err(|error| Broken::Failed(error.to_string()))?;
    events.send_timeout(Ok(event), STALLED).await.map_err(|_| Broken::Gone)
}

/// What happens next to `answer`, unless the client goes away first.
pub async fn next(answer: &mut Answer, events: &Events) -> Result<News, Broken> {
    tokio::select! {
        news = answer.next() => news.map_err(Broken::Failed),
        () = events.closed() => Err(Broken::Gone),
    }
}

/// Waits for all choices, in the order in which they end. When one breaks, the others are ended.
pub async fn join<T: 'static>(mut choices: JoinSet<Result<T, Broken>>) -> Result<Vec<T>, Broken> {
    let mut ends = Vec::with_capacity(choices.len());
    while let Some(outcome) = choices.join_next().await {
        match outcome {
            Ok(end) => ends.push(end?),
            Err(panic) => return Err(Broken::Failed(format!("the request failed: {panic}"))),
        }
    }
    Ok(ends)
}

/// Sends why the answer failed, where there is somebody to tell.
pub async fn close(events: &Events, broken: Broken, error: impl FnOnce(String) -> Event) {
    if let Broken::Failed(reason) = broken {
        // A client that is gone needs no message.
        let _ = events.send(Ok(error(reason))).await;
    }
}
