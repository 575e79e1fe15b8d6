//! The command line: what can be asked for, with the help text that a person reads.

mod serve;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use lily_cpu::Numerics;
use lily_gpu::layout::KvFormat;
use serde::Serialize;

pub use serve::{AccessArgs, LimitArgs, LogArgs, LogFormat, PlaceArgs, ServeArgs};

use crate::models;
use crate::session::DEFAULT_CONTEXT;

/// One engine for one model: Qwen3.6-35B-A3B, 4-bit, on the machine in front of you.
#[derive(Debug, Parser)]
#[command(name = "lily", version)]
pub struct Lily {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What `lily` can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Ask a question, or talk: without a question, in a terminal, an interactive session
    Chat(ChatArgs),
    /// Serve the model over HTTP in OpenAI's and Anthropic's protocols
    Serve(ServeArgs),
    /// Measure prefill and decode speed, memory, and how near they come to what the machine can do
    Bench(BenchArgs),
    /// Fetch a model from the Hugging Face hub, or the rest of one
    #[command(after_help = PULL_ENVIRONMENT)]
    Pull(PullArgs),
    /// Make the 4-bit checkpoint that Lily runs from an unquantized one
    #[command(after_help = CONVERT_NOTES)]
    Convert(ConvertArgs),
    /// Look at this machine: backends, memory, disk and limits, what stands in the way, and what to run next
    #[command(after_help = DOCTOR_EXIT_CODES)]
    Doctor(DoctorArgs),
    /// Show what a checkpoint holds and whether Lily runs it
    Inspect(InspectArgs),
    /// Score how well a model predicts a text, and how far one backend or checkpoint is from another
    Eval(EvalArgs),
    /// Show what a GPU runs for one decoded token or a prompt: kernels, what waits for what, bytes; needs no GPU
    Plan(PlanArgs),
    /// Write a checkpoint with random weights in the real layout, to measure speed and memory with
    Synth(SynthArgs),
    /// Measure how often the demo answers its held-out questions correctly
    DemoScore(ScoreArgs),
    /// Print the completions of a shell, to be read by it when it starts
    Completions(CompletionsArgs),
    /// Write the manual pages into a directory, such as ~/.local/share/man/man1
    Man(ManArgs),
}

/// What `lily pull` heeds beside its flags.
const PULL_ENVIRONMENT: &str = "Environment: HF_HOME or HF_HUB_CACHE say where models are kept (with what other Hugging Face \
tools have fetched), HF_TOKEN who asks, HF_ENDPOINT which hub, HF_HUB_OFFLINE=1 that nobody is asked. Whatever ends it, the \
same command goes on from what is here.";

/// What `lily convert` needs and gives.
const CONVERT_NOTES: &str = "Without --optimize the values are those of `mlx_lm.convert --quantize --dtype bfloat16`: groups of 64, the gates of \
the experts in 8 bits, the rest in 4. Qwen3.6-35B-A3B takes 70 GB of disk before and 20 GB after; memory stays below 1 GB. \
Whatever ends it, the same command goes on after the weight files that are whole.";

/// What a script can rely on.
const DOCTOR_EXIT_CODES: &str = "Exit code: 0 where the model can run here from memory, at the context asked for (it need not \
be here yet, where the disk has room for it); 1 where something stands in the way, named under \"In the way\" (JSON: \
`problems`); 2 for a wrong flag.";

/// `lily-server`: the same as `lily serve`.
#[derive(Debug, Parser)]
#[command(
    name = "lily-server",
    version,
    about = "Serve the model over HTTP in OpenAI's and Anthropic's protocols"
)]
pub struct LilyServer {
    /// The flags of `lily serve`.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// A device that models run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// The best that works
    #[default]
    Auto,
    /// An NVIDIA card
    Cuda,
    /// The processor
    Cpu,
    /// An Apple GPU, on macOS
    Metal,
}

/// How the KV cache stores keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum KvCacheType {
    /// IEEE halves
    #[default]
    F16,
    /// 8-bit integers with a scale for each key and value: about half the memory
    Q8,
}

impl KvCacheType {
    /// The processor's arithmetic with such a cache.
    pub fn numerics(self) -> Numerics {
        match self {
            KvCacheType::F16 => Numerics::Int8,
            KvCacheType::Q8 => Numerics::Int8KvQ8,
        }
    }

    /// How the pages of a GPU store it.
    pub fn pages(self) -> KvFormat {
        match self {
            KvCacheType::F16 => KvFormat::F16,
            KvCacheType::Q8 => KvFormat::Q8,
        }
    }
}

/// Which model, and how it runs.
#[derive(Clone, Debug, Default, Args)]
pub struct ModelArgs {
    /// Directory of a checkpoint (MLX 4-bit), or a repository of the Hugging Face hub as OWNER/NAME or
    /// OWNER/NAME@REVISION, which is fetched where it is not here; without it the built-in demo runs
    #[arg(long, value_name = "DIR|REPO")]
    pub model_path: Option<PathBuf>,
    /// Longest context in tokens, prompt and answer together [default: the model's, at most 32768]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub ctx_len: Option<usize>,
    /// Device to compute with; `auto` takes an NVIDIA card that will do, else the CPU
    #[arg(long, value_enum, value_name = "NAME", default_value_t)]
    pub backend: BackendKind,
    /// Which card, counted from 0 as the driver does
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: usize,
    /// Most memory of an NVIDIA card that is taken, such as 24GB, weights and all; the rest is left to others [default:
    /// what is free]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub gpu_memory: Option<u64>,
    /// Threads that the CPU computes with [default: the physical cores]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// How keys and values of the context are stored; q8 takes about half the memory
    #[arg(long, value_enum, value_name = "TYPE", default_value_t)]
    pub kv_cache_type: KvCacheType,
    /// Let the model think before it answers
    #[arg(long)]
    pub think: bool,
}

/// What is kept of earlier prompts and answers, so that it need not be computed again.
#[derive(Clone, Debug, Default, Args)]
pub struct CacheArgs {
    /// Memory for the prefix cache, such as 4GB or 512MiB; 0 turns it off [default: half of the memory that is
    /// left, at most 8GB and sixteen full contexts]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub cache_bytes: Option<u64>,
    /// Directory in which the prefix cache outlives the program
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Most that the files in that directory may take
    #[arg(long, value_name = "BYTES", default_value = "20GB", value_parser = bytes, requires = "cache_dir")]
    pub cache_dir_bytes: u64,
}

/// How the next token is chosen; greedy where nothing is said.
#[derive(Clone, Debug, Args)]
pub struct SamplingArgs {
    /// Randomness: 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    /// Choose among the likeliest tokens that hold this much probability together
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f32,
    /// Choose among this many of the likeliest tokens; 0 is all
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: usize,
    /// Choose among tokens at least this probable, relative to the likeliest
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub min_p: f32,
    /// Seed of the random choices; the same seed gives the same answer
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

impl Default for SamplingArgs {
    fn default() -> SamplingArgs {
        SamplingArgs { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: None }
    }
}

/// Arguments of `lily chat`.
#[derive(Clone, Debug, Args)]
pub struct ChatArgs {
    /// The question; without it, it is read from standard input where that is not a terminal
    pub question: Option<String>,
    /// Instructions that the model sees before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Most tokens of an answer [default: what the context leaves]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub max_tokens: Option<usize>,
    /// Say on standard error how fast each answer came
    #[arg(long)]
    pub stats: bool,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prefix cache.
    #[command(flatten)]
    pub cache: CacheArgs,
}

/// Arguments of `lily bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// Prompt lengths whose prefill is timed; 0 times none
    /// [default: 256, 1024, 4096, … as far as a minute and the context go]
    #[arg(short, long, visible_alias = "n-prompt", value_name = "N,…", value_delimiter = ',')]
    pub prompt: Option<Vec<usize>>,
    /// Context depths at which decode is timed
    /// [default: 256, 1024, 4096, … as far as a minute and the context go]
    #[arg(short, long, visible_alias = "n-depth", value_name = "N,…", value_delimiter = ',')]
    pub depth: Option<Vec<usize>>,
    /// Tokens that are decoded in each run; 0 times no decode
    #[arg(short = 'n', long = "gen", visible_alias = "n-gen", value_name = "N", default_value_t = 32)]
    pub generated: usize,
    /// Runs of each measurement; median, lowest and highest are reported
    #[arg(short, long, visible_alias = "repetitions", value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub repeat: usize,
    /// Leave out the run before each measurement that is not counted
    #[arg(long)]
    pub no_warmup: bool,
    /// Do not measure what the machine can do at the most, which takes a second or two and up to 4 GB of memory
    #[arg(long)]
    pub no_floor: bool,
    /// Time each stage of a decoded token too, one after the other, where the backend can
    #[arg(long)]
    pub profile: bool,
    /// Print JSON with every single run instead of the table
    #[arg(long)]
    pub json: bool,
    /// Draw both curves into this SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
}

/// What a backend is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Against {
    /// Plain f32 on the processor: slow, and what every backend is held to
    F32,
    /// The processor
    Cpu,
    /// An NVIDIA card
    Cuda,
    /// An Apple GPU, on macOS
    Metal,
}

/// Arguments of `lily eval`.
#[derive(Clone, Debug, Args)]
pub struct EvalArgs {
    /// The text, in UTF-8; markers of the chat template in it are read as such
    #[arg(value_name = "FILE", conflicts_with = "reference")]
    pub text: Option<PathBuf>,
    /// Compare with this backend, with an f16 KV cache, computed beside the one that is scored
    #[arg(long, value_enum, value_name = "NAME", conflicts_with = "reference")]
    pub against: Option<Against>,
    /// Compare with this checkpoint, which must have the same vocabulary
    #[arg(long, value_name = "DIR|REPO", conflicts_with = "reference")]
    pub against_model: Option<PathBuf>,
    /// Score the tokens of this file, and compare with what another program said of them, such as
    /// oracle/golden/mlx_teacher_forced.safetensors
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Score plain f32 arithmetic on the processor instead of a backend
    #[arg(long, conflicts_with = "kv_cache_type")]
    pub f32: bool,
    /// Tokens that are read from an empty context, one piece of the text after the other
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_two)]
    pub window: usize,
    /// Score no more than the first N positions
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub positions: Option<usize>,
    /// Score only what the model was trained to write, and read what stands between as prompts are read
    #[arg(long, requires = "reference")]
    pub answers_only: bool,
    /// Print JSON with every single position instead of the table
    #[arg(long)]
    pub json: bool,
    /// Draw the figures by context into this SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
}

/// Arguments of `lily pull`.
#[derive(Clone, Debug, Args)]
pub struct PullArgs {
    /// The repository, as OWNER/NAME or OWNER/NAME@REVISION
    #[arg(default_value = models::DEFAULT)]
    pub repo: String,
    /// Files that come at once
    #[arg(short, long, value_name = "N", default_value_t = models::JOBS, value_parser = at_least_one)]
    pub jobs: usize,
    /// How often a request is made again that brought nothing, after waits of 1, 2, 4, … seconds
    #[arg(long, value_name = "N", default_value_t = models::RETRIES)]
    pub retries: u32,
}

/// Arguments of `lily convert`.
#[derive(Clone, Debug, Args)]
pub struct ConvertArgs {
    /// Directory of an unquantized checkpoint (BF16, F16 or F32) in Hugging Face's layout, or a repository of the hub
    #[arg(value_name = "SRC")]
    pub from: PathBuf,
    /// Directory to write to: one that does not exist, is empty, or holds what an interrupted run left
    #[arg(value_name = "DST")]
    pub to: PathBuf,
    /// Search scale and bias of every group for the least squared error, in the same format, instead of taking MLX's
    #[arg(long)]
    pub optimize: bool,
    /// Threads that convert [default: one for each logical processor]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Most bytes of a weight file, which is what an interruption can cost
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = bytes)]
    pub shard_bytes: u64,
}

/// Arguments of `lily doctor`.
#[derive(Clone, Debug, Args)]
pub struct DoctorArgs {
    /// Directory of a checkpoint, or a repository that was fetched before
    /// [default: what `lily pull` fetches, else its shapes]
    #[arg(long, value_name = "DIR|REPO")]
    pub model_path: Option<PathBuf>,
    /// Context in tokens that the model is to have
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CONTEXT, value_parser = at_least_one)]
    pub ctx_len: usize,
    /// How keys and values of the context are to be stored
    #[arg(long, value_enum, value_name = "TYPE", default_value_t)]
    pub kv_cache_type: KvCacheType,
    /// Print JSON instead of the page
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `lily inspect`.
#[derive(Clone, Debug, Args)]
pub struct InspectArgs {
    /// Directory of a checkpoint, or a repository of the hub
    #[arg(value_name = "DIR|REPO")]
    pub dir: PathBuf,
    /// How keys and values of the context are to be stored
    #[arg(long, value_enum, value_name = "TYPE", default_value_t)]
    pub kv_cache_type: KvCacheType,
}

/// A GPU's programming interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GpuKind {
    /// NVIDIA; the plan is for an H100 or H200
    Cuda,
    /// Apple; the plan is for a GPU of the Max class
    Metal,
}

/// Arguments of `lily plan`.
#[derive(Clone, Debug, Args)]
pub struct PlanArgs {
    /// The kind of GPU
    #[arg(long, value_enum, value_name = "NAME")]
    pub backend: GpuKind,
    /// Directory of a checkpoint, or a repository of the hub [default: the shapes of Qwen3.6-35B-A3B, 4-bit]
    #[arg(long, value_name = "DIR|REPO")]
    pub model_path: Option<PathBuf>,
    /// Positions of context that each sequence has [default: 256, or the tokens of --prefill]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub context: Option<usize>,
    /// Sequences that are decoded together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub batch: usize,
    /// The last N tokens of --context as a prompt, instead of a step of decode
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "batch")]
    pub prefill: Option<usize>,
    /// How keys and values of the context are stored
    #[arg(long, value_enum, value_name = "TYPE", default_value_t)]
    pub kv_cache_type: KvCacheType,
    /// Write the dependencies into this file as a graph in Graphviz' language
    #[arg(long, value_name = "FILE")]
    pub dot: Option<PathBuf>,
}

/// Arguments of `lily synth`.
#[derive(Clone, Debug, Args)]
pub struct SynthArgs {
    /// Directory to write to; made where it does not exist
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Seed of the random weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Layers, a multiple of 4: 40 is the full model of 19.5 GB
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = at_least_one)]
    pub layers: usize,
}

/// Arguments of `lily demo-score`.
#[derive(Clone, Debug, Args)]
pub struct ScoreArgs {
    /// Held-out questions, one JSON object a line
    #[arg(long, value_name = "FILE", default_value = "demo/heldout.jsonl")]
    pub heldout: PathBuf,
    /// Score only this task family; can be given several times
    #[arg(long, value_name = "NAME")]
    pub family: Vec<String>,
    /// Score only the first N questions of each family
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub limit: Option<usize>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
}

/// Arguments of `lily completions`.
#[derive(Clone, Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: Shell,
    /// The program that is completed
    #[arg(long, value_enum, value_name = "NAME", default_value_t)]
    pub program: Program,
}

/// A program of this crate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Program {
    /// The one that does everything
    #[default]
    Lily,
    /// The server alone
    LilyServer,
}

/// Arguments of `lily man`.
#[derive(Clone, Debug, Args)]
pub struct ManArgs {
    /// The directory; made where it does not exist
    pub dir: PathBuf,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".to_string()),
        Ok(number) => Ok(number),
        Err(_) => Err("it must be a whole number".to_string()),
    }
}

fn at_least_two(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        1 => Err("it must be at least 2".to_string()),
        number => Ok(number),
    }
}

/// A number of bytes: digits, and a unit of powers of 1000 (KB, MB, GB, TB) or 1024 (KiB, MiB, GiB, TiB).
fn bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 9] = [
        ("", 1),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
    ];
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: Option<u64> = text[..end].parse().ok();
    let unit = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(text[end..].trim()));
    match (number, unit) {
        (Some(number), Some((_, unit))) => {
            number.checked_mul(*unit).ok_or_else(|| "it is too much".to_string())
        }
        _ => Err("it must be a whole number and a unit, such as 4GB or 512MiB".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn byte_counts_are_read_with_their_units() {
        let read = ["0", "17", "4GB", "4 gb", "512MiB", "1TiB"].map(|text| bytes(text).unwrap());
        assert_eq!(read, [0, 17, 4_000_000_000, 4_000_000_000, 512 << 20, 1 << 40]);
        for wrong in ["", "GB", "-1", "1.5GB", "4 GBs", "99999999TB", "99999999999999999999"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
