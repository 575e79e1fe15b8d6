//! Sessions of coding agents, replayed against the real CPU backend on the demo: what is processed again, and
//! that the cache changes no token of any answer.
//!
//! The conversations are synthetic: thirty turns of questions, tool calls and results, with what makes other
//! caches start over. The ideal is what no cache can save: for each prompt the tokens after the longest
//! beginning that it shares with anything that was read or written before.

mod common;

use common::demo::Demo;
use common::{outcome, wait_until_idle};
use lily_engine::engine::{Engine, Generation, Request};
use lily_engine::output::{Delta, OutputParser};
use serde_json::{Value, json};

/// Tokens processed, in multiples of the ideal, that a replay may take.
const MOST: f64 = 1.15;

/// Room for every snapshot of a replay.
const CACHE_BYTES: u64 = 2 << 30;

/// Tokens of an answer: enough to think a little and say something.
const ANSWER: usize = 16;

/// What a client does.
type Replay = fn(&mut Client<'_>);

/// One client's side of a replay.
struct Client<'a> {
    demo: &'a Demo,
    engine: Engine,
    tools: Vec<Value>,
    thinking: bool,
    /// All that the engine has read and written.
    known: Vec<Vec<u32>>,
    prompts: usize,
    ideal: usize,
    processed: usize,
    /// Every prompt and its answer, in order.
    answers: Vec<(Vec<u32>, Vec<u32>)>,
}

/// A request under way.
struct Pending {
    prompt: Vec<u32>,
    generation: Generation,
}

fn request(prompt: Vec<u32>) -> Request {
    Request { max_tokens: Some(ANSWER), ..Request::new(prompt) }
}

impl Client<'_> {
    fn submit(&mut self, messages: &[Value]) -> Pending {
        let prompt = self.demo.prompt(messages, &self.tools, self.thinking);
        let agreement = |known: &Vec<u32>| known.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
        let shared = self.known.iter().map(agreement).max().unwrap_or(0);
        // One token is processed in any case: the logits come from it.
        self.ideal += prompt.len() - shared.min(prompt.len() - 1);
        self.prompts += prompt.len();
        self.known.push(prompt.clone());
        Pending { generation: self.engine.submit(request(prompt.clone())).unwrap(), prompt }
    }

    /// The text of the answer without its reasoning, as a client that strips it sends it back.
    fn finish(&mut self, pending: Pending) -> String {
        let outcome = outcome(pending.generation);
        assert_eq!(outcome.failure, None);
        assert_eq!(outcome.usage.prompt_tokens, pending.prompt.len());
        self.processed += outcome.usage.prompt_tokens - outcome.usage.cached_tokens;
        self.known.push([&pending.prompt[..], &outcome.tokens].concat());
        self.answers.push((pending.prompt, outcome.tokens));
        let mut parser = OutputParser::new(self.thinking, &[]);
        let deltas = [parser.push(&outcome.text), parser.finish()].concat();
        let content = deltas.into_iter().filter_map(|delta| match delta {
            Delta::Content(text) => Some(text),
            _ => None,
        });
        content.collect()
    }

    fn ask(&mut self, messages: &[Value]) -> String {
        let pending = self.submit(messages);
        self.finish(pending)
    }
}

fn tools() -> Vec<Value> {
    let tool = |name: &str, what: &str| {
        json!({"type": "function", "function": {"name": name, "description": what, "parameters": {
            "type": "object", "properties": {"path": {"type": "string", "description": "A path."}},
            "required": ["path"]
        }}})
    };
    vec![tool("read_file", "Reads a file.")]
}

fn system(name: &str) -> Value {
    let text = format!(
        "You are {name}, who works on a small program. Read before you write; answer in one sentence."
    );
    json!({"role": "system", "content": text})
}

fn question(turn: usize) -> Value {
    let words = ["red", "blue", "green", "old", "new", "big", "small"];
    let (first, second) = (words[turn % 7], words[(turn * 3 + 1) % 7]);
    let text = format!("Question {turn}: which of the {first} and {second} files did Ann change last?");
    json!({"role": "user", "content": text})
}

fn said(content: &str) -> Value {
    json!({"role": "assistant", "content": content})
}

fn called(content: &str, turn: usize) -> Value {
    let call =
        json!({"function": {"name": "read_file", "arguments": {"path": format!("folder{turn}/list.txt")}}});
    json!({"role": "assistant", "content": content, "tool_calls": [call]})
}

/// A tool's answer of some lines.
fn result(turn: usize, lines: usize) -> Value {
    let lines: Vec<String> =
        (0..lines).map(|line| format!("line {line} has {} names", (turn * 13 + line * 5) % 40)).collect();
    json!({"role": "tool", "content": lines.join("\n")})
}

/// One question, then thirty calls of tools; what the model says comes back word for word.
fn tool_loop(client: &mut Client<'_>) {
    let mut messages = vec![system("Ada"), question(0)];
    for turn in 0..30 {
        let content = client.ask(&messages);
        messages.extend([called(&content, turn), result(turn, 2)]);
    }
}

/// Thirty questions to a model that thinks; its reasoning does not come back.
fn stripped_reasoning(client: &mut Client<'_>) {
    client.thinking = true;
    let mut messages = vec![system("Bob"), question(0)];
    for turn in 1..=30 {
        let content = client.ask(&messages);
        messages.extend([said(&content), question(turn)]);
    }
}

/// Questions with several calls each, by a model that thinks: the next question changes how the template writes
/// all turns after the last one.
fn questions_with_tools(client: &mut Client<'_>) {
    client.thinking = true;
    let mut messages = vec![system("Cleo")];
    for turn in 0..6 {
        messages.push(question(turn));
        for call in 0..4 {
            let content = client.ask(&messages);
            messages.extend([called(&content, 10 * turn + call), result(call, 2)]);
        }
        let content = client.ask(&messages);
        messages.push(said(&content));
    }
}

/// The client puts the time at the end of every prompt and takes it out again.
fn late_timestamp(client: &mut Client<'_>) {
    let mut messages = vec![system("Dora")];
    for turn in 0..30 {
        messages.push(question(turn));
        let time = format!("The time is {:02}:{:02}.", turn / 60 + 9, turn * 2 % 60);
        let content = client.ask(&[&messages[..], &[json!({"role": "user", "content": time})]].concat());
        messages.push(said(&content));
    }
}

/// Thirty turns, some of which go back to an earlier one and on from there.
fn branching(client: &mut Client<'_>) {
    client.thinking = true;
    let mut messages = vec![system("Emil"), question(0)];
    for turn in 1..=20 {
        let content = client.ask(&messages);
        messages.extend([said(&content), question(turn)]);
    }
    for back in [5, 11, 16, 5] {
        let mut branch = messages[..2 * back].to_vec();
        for turn in 0..3 {
            // At the fork another question than before, then on.
            branch.push(question(100 + back + turn + client.answers.len()));
            let content = client.ask(&branch);
            branch.push(said(&content));
        }
    }
}

/// Two conversations with one agent, which take turns.
fn interleaved(client: &mut Client<'_>) {
    let mut both = [vec![system("Fritz")], vec![system("Fritz")]];
    for turn in 0..15 {
        for (index, messages) in both.iter_mut().enumerate() {
            messages.push(question(turn * 2 + index));
            let content = client.ask(messages);
            messages.push(said(&content));
        }
    }
}

/// Six agents with one system block, all at once, five turns each.
fn sub_agents(client: &mut Client<'_>) {
    let mut agents: Vec<Vec<Value>> = (0..6).map(|agent| vec![system("Hugo"), question(agent)]).collect();
    for turn in 0..5 {
        let pending: Vec<Pending> = agents.iter().map(|messages| client.submit(messages)).collect();
        for ((agent, messages), pending) in agents.iter_mut().enumerate().zip(pending) {
            let content = client.finish(pending);
            messages.extend([called(&content, agent), result(agent + turn, 8)]);
        }
    }
}

#[test]
fn replays_process_little_more_than_what_is_new_and_answer_the_same_without_the_cache() {
    let replays: [(&str, Replay); 7] = [
        ("tool loop, 30 turns", tool_loop),
        ("stripped reasoning, 30 turns", stripped_reasoning),
        ("questions with tools, thinking", questions_with_tools),
        ("late timestamp, 30 turns", late_timestamp),
        ("branching from earlier turns", branching),
        ("two conversations interleaved", interleaved),
        ("six sub-agents at once", sub_agents),
    ];
    let demo = Demo::load();
    let cold = demo.engine(demo.backend(usize::MAX), demo.cache(0));
    println!("{:34} {:>8} {:>8} {:>10} {:>6}", "replay", "prompts", "ideal", "processed", "ratio");
    let mut ratios = Vec::new();
    for (name, replay) in replays {
        let engine = demo.engine(demo.backend(usize::MAX), demo.cache(CACHE_BYTES));
        let mut client = Client {
            demo: &demo,
            engine,
            tools: tools(),
            thinking: false,
            known: Vec::new(),
            prompts: 0,
            ideal: 0,
            processed: 0,
            answers: Vec::new(),
        };
        replay(&mut client);
        let Client { engine, prompts, ideal, processed, answers, .. } = client;
        let ratio = processed as f64 / ideal as f64;
        println!("{name:34} {prompts:8} {ideal:8} {processed:10} {ratio:6.3}");
        wait_until_idle(&engine);
        let stats = engine.stats();
        assert_eq!(stats.prefilled_tokens, processed as u64, "{name}: cached_tokens do not tell the truth");
        assert_eq!(stats.memory.used, stats.memory.snapshots, "{name}: something is left");
        ratios.push((name, ratio));

        // The same prompts give the same answers, and so the whole replay would be the same.
        let submit = |(prompt, _): &(Vec<u32>, Vec<u32>)| cold.submit(request(prompt.clone())).unwrap();
        for batch in answers.chunks(8) {
            let running: Vec<Generation> = batch.iter().map(submit).collect();
            for (generation, (_, answer)) in running.into_iter().zip(batch) {
                let outcome = outcome(generation);
                assert_eq!(outcome.usage.cached_tokens, 0);
                assert!(outcome.tokens == *answer, "{name}: the cache changes an answer");
            }
        }
    }
    wait_until_idle(&cold);
    assert_eq!(cold.stats().memory.used, 0);
    for (name, ratio) in ratios {
        assert!(ratio <= MOST, "{name}: {ratio:.3} times the ideal");
    }
}
