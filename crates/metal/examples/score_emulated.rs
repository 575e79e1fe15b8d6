//! What the emulated Metal backend says of the texts of a stored reference, token by token: the figures of `lily eval`, which
//! knows no emulator, and a stored reference of its own for it.
//!
//! `cargo run -p lily-metal --example score_emulated -- IN OUT ANSWERS` reads the documents of `IN`
//! (`oracle/golden/mlx_teacher_forced.safetensors`), those with the largest share of answers first, until so many positions before
//! a token were scored that the demo was trained to write. `OUT` is what `lily eval --reference` reads.

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("the emulator runs on Linux; run this there");
}

#[cfg(target_os = "linux")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    emulated::run()
}

#[cfg(target_os = "linux")]
mod emulated {
    use std::error::Error;
    use std::time::Instant;

    use lily_engine::backend::{Backend, Want};
    use lily_gpu::memory::Context;
    use lily_metal::emulator::{Emulator, Options};
    use lily_metal::{MetalBackend, MetalOptions};
    use lily_model::checkpoint::Checkpoint;
    use safetensors::tensor::TensorView;
    use safetensors::{Dtype, SafeTensors};

    type Outcome<T> = Result<T, Box<dyn Error>>;

    /// Rows whose logits are looked at together.
    const CHUNK: usize = 32;

    /// A text, and what the reference says of each token in it but the first.
    struct Document {
        tokens: Vec<u32>,
        rows: Vec<Row>,
        answers: Vec<bool>,
    }

    /// What is said of the token after a position.
    #[derive(Clone, Copy)]
    struct Row {
        /// Natural logarithm of the probability of the token that does come next.
        logprob: f64,
        /// The likeliest token, the lowest id among equals.
        best: u32,
    }

    impl Row {
        fn new(logits: &[f32], target: u32) -> Row {
            let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
            let largest = f64::from(logits[best]);
            let total: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
            Row { logprob: f64::from(logits[target as usize]) - largest - total.ln(), best: best as u32 }
        }
    }

    pub fn run() -> Outcome<()> {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let [from, to, answers] = &arguments[..] else {
            return Err("name the stored reference, the file to write, and how many answers to score".into());
        };
        let documents = of_answers(read(&std::fs::read(from)?)?, answers.parse()?);
        let longest = documents.iter().map(|document| document.tokens.len()).max().unwrap_or(1);

        let device = Emulator::new(Options { seed: 1, tracked: false })?;
        let options = MetalOptions { context: Context::Exactly(longest), ..MetalOptions::default() };
        let mut backend = MetalBackend::new(&device, &Checkpoint::demo()?.weights()?, &options)?;
        println!("{}", backend.description());
        let (start, mut scored) = (Instant::now(), Vec::new());
        for (number, document) in documents.iter().enumerate() {
            scored.push(score(&mut backend, &document.tokens)?);
            let seconds = start.elapsed().as_secs_f64();
            eprintln!("{} of {} documents after {seconds:.0} s", number + 1, documents.len());
        }
        let pairs: Vec<(bool, Row, Row)> = documents
            .iter()
            .zip(&scored)
            .flat_map(|(document, rows)| {
                let rows = document.answers.iter().zip(&document.rows).zip(rows);
                rows.map(|((&answer, &reference), &row)| (answer, reference, row))
            })
            .collect();
        report("answers", pairs.iter().filter(|(answer, ..)| *answer));
        report("users' text too", pairs.iter());
        write(to, &documents, &scored)
    }

    /// The documents with the largest share of answers, as many as it takes to have `least` of them.
    fn of_answers(mut documents: Vec<Document>, least: usize) -> Vec<Document> {
        let answers = |document: &Document| document.answers.iter().filter(|&&answer| answer).count();
        let share = |document: &Document| answers(document) as f64 / document.answers.len() as f64;
        documents.sort_by(|a, b| share(b).total_cmp(&share(a)));
        let mut found = 0;
        let enough = documents.iter().take_while(|document| {
            let more = found < least;
            found += answers(document);
            more
        });
        let count = enough.count();
        documents.truncate(count);
        documents
    }

    fn score(backend: &mut dyn Backend, tokens: &[u32]) -> Outcome<Vec<Row>> {
        let vocab = backend.geometry().vocab;
        let sequence = backend.open(None)?;
        let mut rows = Vec::with_capacity(tokens.len() - 1);
        for chunk in tokens[..tokens.len() - 1].chunks(CHUNK) {
            let ticket = backend.extend(sequence, chunk, Want::AllLogits)?;
            for output in backend.collect(ticket)? {
                for logits in output.logits.chunks_exact(vocab) {
                    rows.push(Row::new(logits, tokens[rows.len() + 1]));
                }
            }
        }
        backend.close(sequence);
        Ok(rows)
    }

    /// Prints what `lily eval` does of positions: whether each is an answer, the reference, and the emulator.
    fn report<'a>(what: &str, pairs: impl Iterator<Item = &'a (bool, Row, Row)> + Clone) {
        let count = pairs.clone().count() as f64;
        let mean = |of: fn(&(bool, Row, Row)) -> f64| pairs.clone().map(of).sum::<f64>() / count;
        let (reference, ours) = (mean(|pair| -pair.1.logprob), mean(|pair| -pair.2.logprob));
        let same = 100.0 * mean(|pair| f64::from(u8::from(pair.1.best == pair.2.best)));
        println!(
            "{what}: {count} positions, perplexity {:.5}, {:+.4} %, same top token {same:.2} %",
            ours.exp(),
            100.0 * (ours - reference).exp_m1()
        );
    }

    fn read(bytes: &[u8]) -> Outcome<Vec<Document>> {
        let file = SafeTensors::deserialize(bytes)?;
        let words = |name: &str| -> Outcome<Vec<u32>> {
            let (words, _) = file.tensor(name)?.data().as_chunks::<4>();
            Ok(words.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
        };
        let (tokens, best, logprobs) = (words("tokens")?, words("best")?, words("target_logprobs")?);
        let answer = file.tensor("answer")?.data().to_vec();
        let (mut token, mut position) = (0, 0);
        let mut documents = Vec::new();
        for length in words("lengths")? {
            let length = length as usize;
            let positions = position..position + length - 1;
            let row = |i: usize| Row { logprob: f32::from_bits(logprobs[i]).into(), best: best[i] };
            documents.push(Document {
                tokens: tokens[token..token + length].to_vec(),
                rows: positions.clone().map(row).collect(),
                answers: answer[positions.clone()].iter().map(|&flag| flag != 0).collect(),
            });
            (token, position) = (token + length, positions.end);
        }
        Ok(documents)
    }

    /// Writes `scored` down as a stored reference of `documents`.
    fn write(to: &str, documents: &[Document], scored: &[Vec<Row>]) -> Outcome<()> {
        let bytes = |words: Vec<u32>| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let rows = || scored.iter().flatten();
        let tensors = [
            ("tokens", Dtype::I32, bytes(documents.iter().flat_map(|d| d.tokens.clone()).collect())),
            ("lengths", Dtype::I32, bytes(documents.iter().map(|d| d.tokens.len() as u32).collect())),
            ("best", Dtype::I32, bytes(rows().map(|row| row.best).collect())),
            (
                "target_logprobs",
                Dtype::F32,
                bytes(rows().map(|row| (row.logprob as f32).to_bits()).collect()),
            ),
            ("answer", Dtype::U8, documents.iter().flat_map(|d| &d.answers).map(|&a| u8::from(a)).collect()),
        ];
        let views = tensors.iter().map(|(name, dtype, bytes)| {
            let width = if *dtype == Dtype::U8 { 1 } else { 4 };
            Ok((*name, TensorView::new(*dtype, vec![bytes.len() / width], bytes)?))
        });
        let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        Ok(safetensors::serialize_to_file(views, None, to.as_ref())?)
    }
}
