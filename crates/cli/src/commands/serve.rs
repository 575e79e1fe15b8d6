//! `lily serve` and `lily-server`.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, anyhow};
use lily_server::app::App;
use tokio::net::TcpListener;

use crate::args::ServeArgs;
use crate::session::{self, Session};

/// How long connections may take to write what is left once the server has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Loads the model and serves it until Ctrl-C or SIGTERM.
pub fn run(args: &ServeArgs) -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::builder()
                .with_default_directive(tracing_subscriber::filter::LevelFilter::INFO.into())
                .from_env_lossy(),
        )
        .with_writer(std::io::stderr)
        .init();
    let runtime = tokio::runtime::Runtime::new().context("the async runtime cannot start")?;
    let outcome = runtime.block_on(serve(args));
    runtime.shutdown_timeout(LAST_WORDS);
    outcome
}

async fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    // The port first: finding it taken after a minute of loading would be no kindness.
    let listener = listen(SocketAddr::new(args.host, args.port)).await?;
    let address = listener.local_addr()?;
    let (loaded, cache) = (args.model.clone(), args.cache.clone());
    let Session { mut model, budget } =
        tokio::task::spawn_blocking(move || session::start(&loaded, &cache)).await??;
    if let Some(name) = &args.model_name {
        model.name.clone_from(name);
    }
    eprintln!("lily: {} on {}", model.name, model.engine.description());
    eprintln!("lily: {budget}");
    eprintln!("lily: serving at http://{address}/v1 (Ctrl-C ends it)");
    let app = App { model, api_key: args.api_key.as_deref().map(Into::into), responses: Default::default() };
    lily_server::serve::serve(listener, app, stop_signal()?).await?;
    Ok(())
}

async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => {
            anyhow!("port {} is in use on {}; choose another with --port", address.port(), address.ip())
        }
        _ => anyhow!("cannot listen on {address}: {error}"),
    })
}

/// Completes at the first Ctrl-C or SIGTERM; a second ends the program at once.
fn stop_signal() -> anyhow::Result<impl Future<Output = ()> + Send + 'static> {
    let mut signals = Signals::new()?;
    Ok(async move {
        signals.next().await;
        eprintln!("lily: stopping; answers under way have a few seconds to finish");
        tokio::spawn(async move {
            signals.next().await;
            std::process::exit(1);
        });
    })
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals)
    }

    async fn next(&mut self) {
        // Without a handler the system's default, ending the program, is what remains.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
