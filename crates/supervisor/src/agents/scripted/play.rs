//! Runs the blocks of a script in order.

use std::{fs, io, path::Path, time::Duration};

use harvest_proto::script::{self, Block, ErrorStep, Script};
use serde_json::{Value, json};

use super::{
    program::{Program, Stop},
    shell,
    wire::FromProgram,
};

type BlockResult = Result<(), Stop>;

/// Runs the script in this prompt; `earlier` is the number of prompts before it.
pub(super) async fn prompt(program: &mut Program, text: &str, earlier: usize) -> BlockResult {
    let script = match Script::find(text) {
        Ok(Some(script)) => script,
        Ok(None) => return echo(program, text, earlier),
        Err(error) => return Err(Stop::Failed(error.to_string())),
    };
    for one in script.into_blocks() {
        block(program, one, earlier).await?;
    }
    Ok(())
}

fn echo(program: &Program, text: &str, earlier: usize) -> BlockResult {
    let first: String = text.lines().next().unwrap_or_default().chars().take(200).collect();
    let remembered = script::history_text(earlier);
    let text = format!(
        "This is the scripted agent. It runs the script in a prompt; this prompt has none. You said: \
         {first}\n{remembered}\n"
    );
    Ok(program.send(&FromProgram::Text { text })?)
}

async fn block(program: &mut Program, block: Block, earlier: usize) -> BlockResult {
    match block {
        Block::Text { text, chunks, delay_ms } => {
            for text in script::split_text(&text, chunks) {
                if delay_ms > 0 {
                    program.sleep(Duration::from_millis(delay_ms)).await?;
                }
                program.send(&FromProgram::Text { text })?;
            }
        }
        Block::Thinking(text) => program.send(&FromProgram::Thought { text })?,
        Block::History => {
            program.send(&FromProgram::Text { text: script::history_text(earlier) })?
        }
        Block::Bash(command) => {
            let call = start_tool(program, "Bash", json!({ "command": command }))?;
            let (ok, output) = match program.wait_for_permission(&call).await? {
                Some(refusal) => (false, refusal),
                None => shell::run(program, &command).await?,
            };
            program.send(&FromProgram::Result { call, ok, output })?;
        }
        Block::Ask { question, options } => ask(program, question, options).await?,
        Block::Hang { seconds } => program.sleep(Duration::from_secs_f64(seconds)).await?,
        Block::Error(error) => fail(program, &error)?,
        Block::Drop { times } => retries(program, times, None)?,
        Block::Usage(_) => {}
        #[expect(clippy::disallowed_methods, reason = "a crash runs no destructors")]
        Block::Crash(code) => std::process::exit(i32::from(code)),
        Block::Raw(line) => program.write(format!("{line}\n").as_bytes())?,
        Block::Garbage(bytes) => program.write(&[vec![0xff; bytes], vec![b'\n']].concat())?,
        Block::Stderr(line) => eprintln!("{line}"),
        Block::Flood { events, bytes } => flood(program, events, bytes)?,
        file => tool(program, file).await?,
    }
    Ok(())
}

fn start_tool(program: &mut Program, name: &str, input: Value) -> Result<String, Stop> {
    let call = program.new_id("call");
    program.send(&FromProgram::Tool { call: call.clone(), name: name.to_owned(), input })?;
    Ok(call)
}

async fn tool(program: &mut Program, block: Block) -> BlockResult {
    let (name, input) = match &block {
        Block::Write { path, content } => {
            ("Write", json!({ "file_path": path, "content": content }))
        }
        Block::Read(path) => ("Read", json!({ "file_path": path })),
        Block::Edit { path, old, new } => {
            ("Edit", json!({ "file_path": path, "old_string": old, "new_string": new }))
        }
        Block::Tool { name, input } => (name.as_str(), input.clone()),
        _ => return Ok(()),
    };
    let call = start_tool(program, name, input)?;
    let (ok, output) = match program.wait_for_permission(&call).await? {
        Some(refusal) => (false, refusal),
        None => match run_file_tool(block) {
            Ok(output) => (true, output),
            Err(error) => (false, error.to_string()),
        },
    };
    Ok(program.send(&FromProgram::Result { call, ok, output })?)
}

fn run_file_tool(block: Block) -> io::Result<String> {
    match block {
        Block::Write { path, content } => {
            if let Some(folder) = Path::new(&path).parent() {
                fs::create_dir_all(folder)?;
            }
            fs::write(&path, content).map(|()| format!("wrote {path}"))
        }
        Block::Read(path) => Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned()),
        Block::Edit { path, old, new } => {
            let text = fs::read_to_string(&path)?;
            if !text.contains(&old) {
                return Err(io::Error::other(format!("{path} does not contain that text")));
            }
            fs::write(&path, text.replacen(&old, &new, 1)).map(|()| format!("edited {path}"))
        }
        _ => Ok("the scripted agent only simulates this tool".to_owned()),
    }
}

async fn ask(program: &mut Program, question: String, options: Vec<String>) -> BlockResult {
    let request = program.new_id("ask");
    program.send(&FromProgram::Ask { request: request.clone(), question, options })?;
    let answer = program.wait_for_answer(&request).await?;
    Ok(program.send(&FromProgram::Text { text: format!("The answer is {answer}.") })?)
}

// An overloaded service is retried; other errors are final.
fn fail(program: &Program, error: &ErrorStep) -> BlockResult {
    if error.status == 429 || error.status >= 500 {
        return retries(program, error.times, Some(error.status));
    }
    Err(Stop::Failed(format!("API Error: {} {}", error.status, error.message)))
}

fn retries(program: &Program, times: u32, status: Option<u16>) -> BlockResult {
    for attempt in 1..=times {
        program.send(&FromProgram::Retry { attempt, status })?;
    }
    Ok(())
}

fn flood(program: &mut Program, events: usize, bytes: usize) -> BlockResult {
    let output = "x".repeat(bytes);
    for _ in 0..events {
        let call = program.new_id("flood");
        program.send(&FromProgram::Result { call, ok: true, output: output.clone() })?;
    }
    Ok(())
}
