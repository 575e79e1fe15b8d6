//! `lily serve` and `lily-server`.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use axum::http::HeaderValue;
use lily_server::app::{App, Limits};
use lily_server::auth::Keys;
use lily_server::gate::Gate;
use lily_server::metrics::Metrics;
use lily_server::record::Recorder;
use lily_server::serve::Patience;
use tokio::net::TcpListener;

use crate::args::{AccessArgs, ServeArgs};
use crate::session::{self, Session};
use crate::{args, log};

/// How long connections may take to write what is left once the server has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Loads the model and serves it until Ctrl-C or SIGTERM.
pub fn run(args: &ServeArgs) -> anyhow::Result<()> {
    log::start(&args.log)?;
    let runtime = tokio::runtime::Runtime::new().context("the async runtime cannot start")?;
    let outcome = runtime.block_on(serve(args));
    runtime.shutdown_timeout(LAST_WORDS);
    outcome
}

async fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let keys = keys(&args.access)?;
    let origins = origins(&args.access.cors_origin)?;
    let recorder = recorder(&args.log)?;
    // The port first: finding it taken after a minute of loading would be no kindness.
    let listener = listen(SocketAddr::new(args.host, args.port)).await?;
    let address = listener.local_addr()?;
    let gate = Gate::default();
    let service = gate.clone().service(&origins);
    let limits = args.limits;
    let patience = Patience { header_time: limits.header_timeout, grace: limits.grace };
    let server = lily_server::serve::serve(listener, gate.clone(), service, patience, stop_signal()?);

    let loading = async {
        let (loaded, cache, places) = (args.model.clone(), args.cache.clone(), args.places);
        let start = move || session::start(&loaded, &cache, places);
        let Session { mut model, memory, chosen } = tokio::task::spawn_blocking(start).await??;
        if let Some(name) = &args.model_name {
            model.name.clone_from(name);
        }
        let metrics = Metrics::new(&model.name).context("the figures for /metrics cannot be kept")?;
        model.recorder = Recorder { metrics: Some(metrics), ..recorder };
        eprintln!("lily: {} on {} ({chosen})", model.name, model.engine.description());
        eprintln!("lily: {memory}");
        let body_bytes = usize::try_from(limits.max_body).unwrap_or(usize::MAX);
        let limits = Limits { body_bytes, body_time: limits.body_timeout };
        gate.open(App { model, keys, limits, responses: Default::default() });
        eprintln!("lily: serving at http://{address}/v1 (Ctrl-C ends it)");
        anyhow::Ok(())
    };
    tokio::pin!(server);
    tokio::select! {
        // Asked to stop before the model was there.
        ended = &mut server => return Ok(ended?),
        loaded = loading => loaded?,
    }
    Ok(server.await?)
}

/// The keys of the command line and of the file that it names.
fn keys(args: &AccessArgs) -> anyhow::Result<Keys> {
    let mut keys = args.api_key.clone();
    if let Some(path) = &args.api_key_file {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("--api-key-file {} cannot be read", path.display()))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let before = keys.len();
        keys.extend(lines.map(str::to_string));
        if keys.len() == before {
            bail!("--api-key-file {} holds no key; write one a line", path.display())
        }
    }
    // An empty key would be carried by every request that has the header.
    if keys.iter().any(|key| key.trim().is_empty()) {
        bail!("--api-key is empty; give a key or leave the flag out")
    }
    Ok(Keys::new(keys))
}

fn origins(origins: &[String]) -> anyhow::Result<Vec<HeaderValue>> {
    let origin = |origin: &String| {
        let bare = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
        let right = origin == "*" || bare.is_some_and(|host| !host.is_empty() && !host.contains('/'));
        match HeaderValue::from_str(origin) {
            Ok(value) if right => Ok(value),
            _ => bail!(
                "--cors-origin {origin:?} is no origin; give scheme, host and port as browsers send them, such as https://chat.example:8443, or *"
            ),
        }
    };
    origins.iter().map(origin).collect()
}

fn recorder(args: &args::LogArgs) -> anyhow::Result<Recorder> {
    if let Some(dir) = &args.trace_dir {
        std::fs::create_dir_all(dir)
            .with_context(|| format!("--trace-dir {} cannot be made", dir.display()))?;
    }
    let trace_dir = args.trace_dir.as_deref().map(Into::into);
    Ok(Recorder { metrics: None, log_text: args.log_prompts, trace_dir })
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
        eprintln!("lily: stopping; answers under way have a little time to finish");
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
