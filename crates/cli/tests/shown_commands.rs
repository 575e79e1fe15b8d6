//! Every command of Lily's that a page shows or a package runs is one that the programs take: commands, flags, values.

use std::fs;
use std::path::Path;

use clap::Parser;
use clap::error::ErrorKind;
use lily_cli::args::{Lily, LilyServer};

/// A file of the repository.
fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The words of each simple command in a script: quotes are taken away, comments and what is redirected left out. It knows
/// as much of the shell as the pages use.
fn commands(script: &str) -> Vec<Vec<String>> {
    let mut all = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = script.chars().peekable();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(c),
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '\\') if chars.peek() == Some(&'\n') => {
                chars.next();
            }
            (None, '#') if word.is_none() => while chars.next_if(|c| *c != '\n').is_some() {},
            (None, ' ' | '\n' | '|' | '&' | ';' | '(' | ')' | '>' | '<') => {
                let ended = word.take();
                // The number of a stream is no word of the command.
                if !(matches!(c, '>' | '<') && ended.as_deref() == Some("2")) {
                    all.last_mut().expect("there is one").extend(ended);
                }
                match c {
                    ' ' => {}
                    '>' | '<' => all.push(vec!["to".to_owned()]),
                    _ => all.push(Vec::new()),
                }
            }
            (None, _) => word.get_or_insert_default().push(c),
        }
    }
    all.last_mut().expect("there is one").extend(word);
    all.retain(|command| !command.is_empty());
    all
}

/// What of a command is Lily's, the program's name first: behind variables, and behind what starts it.
fn of_lily(command: &[String]) -> Option<Vec<String>> {
    let start = command.iter().position(|word| {
        !word.contains('=') && !["$", "sudo", "nohup", "env", "exec"].contains(&word.as_str())
    })?;
    let command = &command[start..];
    let name = Path::new(&command[0]).file_name()?.to_str()?;
    if name == "lily" || name == "lily-server" {
        return Some([&[name.to_owned()], &command[1..]].concat());
    }
    if name == "cargo" && command.get(1).is_some_and(|word| word == "run") {
        let flags = &command[..command.iter().position(|word| word == "--").unwrap_or(command.len())];
        if flags.iter().any(|word| word == "--example" || word == "-p") {
            return None;
        }
        let program = if flags.iter().any(|word| word == "lily-server") { "lily-server" } else { "lily" };
        return Some([&[program.to_owned()], command.get(flags.len() + 1..).unwrap_or_default()].concat());
    }
    None
}

/// Why the program does not take the command.
fn refusal(command: &[String]) -> Option<String> {
    let outcome = match command[0].as_str() {
        "lily" => Lily::try_parse_from(command).map(drop),
        _ => LilyServer::try_parse_from(command).map(drop),
    };
    let error =
        outcome.err().filter(|e| !matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion))?;
    Some(format!("{command:?}: {error}"))
}

/// The scripts of a page: what stands between ```` ```sh ```` or ```` ```console ```` and the end of the block.
fn scripts(page: &str) -> Vec<String> {
    let mut scripts = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if !["```sh", "```console"].contains(&line) {
            continue;
        }
        let block = lines.by_ref().take_while(|line| *line != "```");
        if line == "```sh" {
            scripts.push(block.collect::<Vec<_>>().join("\n"));
        } else {
            // What a program answers stands below what was typed.
            scripts.extend(block.filter_map(|line| line.strip_prefix("$ ").map(str::to_owned)));
        }
    }
    scripts
}

/// Checks all commands of a page, and gives how many there were.
fn check(page: &str) -> usize {
    let shown: Vec<Vec<String>> = scripts(&read(page))
        .iter()
        .flat_map(|script| commands(script))
        .filter_map(|command| of_lily(&command))
        .collect();
    for command in &shown {
        if let Some(refusal) = refusal(command) {
            panic!("{page}: {refusal}");
        }
    }
    shown.len()
}

#[test]
fn commands_are_found_in_scripts_and_wrong_ones_are_refused() {
    let script = "LILY=1 lily doctor --json > out 2> err  # lily nonsense\n\
                  cd x && cargo run --release -- chat \"a | b # c\" \\\n  --stats | head; lily-server --no-such-flag &\n\
                  other --flag; cargo run -p lily-cpu --example gemv; target/release/lily pull --jobs 0";
    let found: Vec<_> = commands(script).iter().filter_map(|command| of_lily(command)).collect();
    let expected: [&[&str]; 4] = [
        &["lily", "doctor", "--json"],
        &["lily", "chat", "a | b # c", "--stats"],
        &["lily-server", "--no-such-flag"],
        &["lily", "pull", "--jobs", "0"],
    ];
    assert_eq!(found, expected);
    assert_eq!(
        found.iter().map(|command| refusal(command).is_some()).collect::<Vec<_>>(),
        [false, false, true, true]
    );
}

#[test]
fn every_command_on_the_pages_is_one_that_the_programs_take() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut pages: Vec<String> = fs::read_dir(docs)
        .expect("there are pages")
        .map(|entry| {
            format!("docs/{}", entry.expect("it can be read").file_name().to_str().expect("a plain name"))
        })
        .filter(|name| name.ends_with(".md"))
        .collect();
    pages.push("README.md".to_owned());
    for page in pages {
        let count = check(&page);
        // These are nothing without commands.
        let least = match page.as_str() {
            "README.md" => 10,
            "docs/guide.md" => 5,
            _ => 0,
        };
        assert!(count >= least, "{page}: {count} commands");
    }
}

#[test]
fn the_service_of_systemd_starts_what_the_server_takes() {
    let unit = read("packaging/lily.service");
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("it starts something");
    let keys = read("packaging/keys.conf");
    let keys =
        keys.lines().find_map(|line| line.strip_prefix("Environment=\"LILY_KEYS=")).expect("it sets keys");
    let env = read("packaging/lily.env");
    let flags = env.lines().find_map(|line| line.strip_prefix("#LILY_FLAGS=")).expect("it shows flags");
    for (keys, flags) in [("", ""), (keys.trim_end_matches('"'), flags)] {
        let start = start.replace("$LILY_KEYS", keys).replace("$LILY_FLAGS", flags);
        let command = of_lily(&commands(&start)[0]).expect("it starts the server");
        assert_eq!(refusal(&command), None);
    }
    let variable = |line: &str| Some(line.trim_start_matches('#').split_once('=')?.0.to_owned());
    for name in env.lines().filter(|line| line.contains('=')).filter_map(variable) {
        let heeded = ["LILY_MODEL", "LILY_FLAGS", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"];
        assert!(heeded.contains(&name.as_str()), "nobody heeds {name}");
    }
}

#[test]
fn the_agent_of_launchd_starts_what_the_server_takes() {
    let plist = read("packaging/lily.server.plist");
    let (_, arguments) = plist.split_once("<key>ProgramArguments</key>").expect("it starts something");
    let (arguments, _) = arguments.split_once("</array>").expect("the list ends");
    let word = |line: &str| Some(line.trim().strip_prefix("<string>")?.strip_suffix("</string>")?.to_owned());
    let command =
        of_lily(&arguments.lines().filter_map(word).collect::<Vec<_>>()).expect("it starts the server");
    assert!(command.len() > 1, "{command:?}");
    assert_eq!(refusal(&command), None);
}

#[test]
fn the_image_starts_what_the_program_takes() {
    let file = read("packaging/Dockerfile");
    let list = |name: &str| -> Vec<String> {
        let line = file.lines().find_map(|line| line.strip_prefix(name)).expect("it stands there");
        serde_json::from_str(line).expect("a list of words")
    };
    let command = [list("ENTRYPOINT "), list("CMD ")].concat();
    assert!(command.len() > 2, "{command:?}");
    assert_eq!(refusal(&command), None);
}

#[test]
fn every_file_that_a_page_about_packages_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for page in ["docs/guide.md", "docs/packaging.md"] {
        let text = read(page);
        let words = text.split(|c: char| c.is_whitespace() || "`()[]<>,;\"'".contains(c));
        let folders = ["packaging/", "tests/packaging/", "crates/"];
        let named: Vec<&str> =
            words.filter(|word| folders.iter().any(|folder| word.starts_with(folder))).collect();
        assert!(!named.is_empty(), "{page}");
        for file in named {
            assert!(root.join(file.trim_end_matches(['.', ':'])).exists(), "{page} names {file}");
        }
    }
}
