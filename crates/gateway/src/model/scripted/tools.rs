//! Maps the steps of a script to the tools that a request offers. Agents have different names for
//! tools and their arguments.

use harvest_proto::script::Block;
use serde_json::{Value, json};

use super::{
    Part,
    conversation::{Tool, ToolKind},
};

const SHELL: [&str; 6] =
    ["Bash", "bash", "exec_command", "shell_command", "shell", "run_shell_command"];
const WRITE: [&str; 3] = ["Write", "write", "write_file"];
const READ: [&str; 3] = ["Read", "read", "read_file"];
const EDIT: [&str; 3] = ["Edit", "edit", "replace"];
const ASK: [&str; 3] = ["AskUserQuestion", "question", "request_user_input"];
const PATCH: [&str; 1] = ["apply_patch"];
const PATH: [&str; 3] = ["file_path", "filePath", "path"];

/// The call of a step; the error names the step that no tool fits.
pub(super) fn tool_call(block: Block, tools: &[Tool]) -> Result<Part, &'static str> {
    match block {
        Block::Bash(command) => shell(&command, tools).ok_or("bash"),
        Block::Write { path, content } => write(&path, &content, tools).ok_or("write"),
        Block::Read(path) => read(&path, tools).ok_or("read"),
        Block::Edit { path, old, new } => edit(&path, &old, &new, tools).ok_or("edit"),
        Block::Ask { question, options } => ask(&question, &options, tools).ok_or("ask"),
        Block::Tool { name, input } => Ok(by_name(name, input, tools)),
        _ => Err("a step for the scripted agent only"),
    }
}

fn offered<'a>(tools: &'a [Tool], names: &[&str]) -> Option<&'a Tool> {
    names.iter().find_map(|name| tools.iter().find(|tool| tool.name == *name))
}

fn call(tool: &Tool, input: Value) -> Part {
    Part::Call { tool: tool.clone(), input }
}

fn shell(command: &str, tools: &[Tool]) -> Option<Part> {
    let tool = offered(tools, &SHELL)?;
    let mut input = if tool.argument(&["cmd"]).is_some() {
        json!({"cmd": command})
    } else if tool.schema["properties"]["command"]["type"] == "array" {
        json!({"command": ["bash", "-lc", command]})
    } else {
        json!({"command": command})
    };
    if tool.argument(&["description"]).is_some() {
        input["description"] = json!("Run a scripted command");
    }
    Some(call(tool, input))
}

fn path_of(tool: &Tool) -> &'static str {
    tool.argument(&PATH).unwrap_or(PATH[0])
}

fn write(path: &str, content: &str, tools: &[Tool]) -> Option<Part> {
    if let Some(tool) = offered(tools, &WRITE) {
        return Some(call(tool, json!({path_of(tool): path, "content": content})));
    }
    if let Some(tool) = offered(tools, &PATCH) {
        let lines: String = content.lines().map(|line| format!("+{line}\n")).collect();
        return Some(patch(tool, &format!("*** Add File: {path}\n{lines}")));
    }
    let path = quoted(path);
    let command =
        format!("mkdir -p \"$(dirname {path})\" && printf %s {} > {path}", quoted(content));
    shell(&command, tools)
}

fn read(path: &str, tools: &[Tool]) -> Option<Part> {
    match offered(tools, &READ) {
        Some(tool) => Some(call(tool, json!({path_of(tool): path}))),
        None => shell(&format!("cat {}", quoted(path)), tools),
    }
}

fn edit(path: &str, old: &str, new: &str, tools: &[Tool]) -> Option<Part> {
    if let Some(tool) = offered(tools, &EDIT) {
        let old_name = tool.argument(&["old_string", "oldString"]).unwrap_or("old_string");
        let new_name = tool.argument(&["new_string", "newString"]).unwrap_or("new_string");
        let mut input = json!({path_of(tool): path, old_name: old, new_name: new});
        if tool.argument(&["instruction"]).is_some() {
            input["instruction"] = json!("Make a scripted change");
        }
        return Some(call(tool, input));
    }
    let Some(tool) = offered(tools, &PATCH) else {
        let (old, new, path) = (quoted(old), quoted(new), quoted(path));
        let replace = "s/\\Q$ENV{OLD}\\E/$ENV{NEW}/";
        return shell(&format!("OLD={old} NEW={new} perl -0pi -e '{replace}' {path}"), tools);
    };
    let lines = |sign: &str, text: &str| -> String {
        text.lines().map(|line| format!("{sign}{line}\n")).collect()
    };
    let hunk = format!("*** Update File: {path}\n@@\n{}{}", lines("-", old), lines("+", new));
    Some(patch(tool, &hunk))
}

fn patch(tool: &Tool, change: &str) -> Part {
    let text = format!("*** Begin Patch\n{change}*** End Patch");
    let input = match tool.kind {
        ToolKind::Custom => Value::String(text),
        ToolKind::Function => {
            let name = tool.argument(&["patchText", "input", "patch"]).unwrap_or("input");
            json!({ name: text })
        }
    };
    call(tool, input)
}

fn ask(question: &str, options: &[String], tools: &[Tool]) -> Option<Part> {
    let tool = offered(tools, &ASK)?;
    let options: Vec<_> =
        options.iter().map(|option| json!({"label": option, "description": option})).collect();
    let mut asked = json!({"question": question, "header": "Question", "options": options});
    match tool.name.as_str() {
        "question" => asked["multiple"] = json!(false),
        "request_user_input" => asked["id"] = json!("question"),
        _ => asked["multiSelect"] = json!(false),
    }
    Some(call(tool, json!({"questions": [asked]})))
}

/// A tool by its name, whether or not it is offered: agents load some tools only when they are
/// called. `mcp__SERVER__TOOL` finds the tool under the names that other agents give it.
fn by_name(name: String, input: Value, tools: &[Tool]) -> Part {
    let exact = tools.iter().find(|tool| tool.name == name && tool.namespace.is_none());
    let found = exact.or_else(|| {
        let (server, own) = name.strip_prefix("mcp__")?.split_once("__")?;
        tools.iter().find(|tool| match &tool.namespace {
            Some(namespace) => {
                tool.name == own && namespace.trim_end_matches('_').ends_with(server)
            }
            None => {
                tool.name == format!("{server}_{own}") || tool.name == format!("mcp_{server}_{own}")
            }
        })
    });
    let tool = found.cloned().unwrap_or_else(|| Tool { name, ..Tool::default() });
    Part::Call { tool, input }
}

/// A text as one word of a shell command.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str, properties: Value) -> Tool {
        Tool { name: name.to_owned(), schema: json!({"properties": properties}), ..Tool::default() }
    }

    fn called(step: Value, tools: &[Tool]) -> (String, Value) {
        let script =
            serde_json::from_value::<harvest_proto::script::Script>(json!([step])).unwrap();
        let block = script.answer(0).remove(0);
        match tool_call(block, tools).unwrap() {
            Part::Call { tool, input } => {
                let namespace = tool.namespace.map(|name| format!("{name}/")).unwrap_or_default();
                (format!("{namespace}{}", tool.name), input)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn shell_step_fits_every_agent() {
        let text = json!({"type": "string"});
        let array = json!({"type": "array"});
        for (name, properties, input) in [
            (
                "Bash",
                json!({"command": text, "description": text}),
                json!({"command": "ls", "description": "Run a scripted command"}),
            ),
            ("bash", json!({"command": text}), json!({"command": "ls"})),
            ("exec_command", json!({"cmd": text}), json!({"cmd": "ls"})),
            ("shell", json!({"command": array}), json!({"command": ["bash", "-lc", "ls"]})),
        ] {
            let tools = [tool("other", json!({})), tool(name, properties)];
            assert_eq!(called(json!({"bash": "ls"}), &tools), (name.to_owned(), input));
        }
    }

    #[test]
    fn file_steps_fit_every_agent() {
        let write = json!({"write": {"path": "/w/a", "content": "x\ny\n"}});
        let claude = [
            tool("Write", json!({"file_path": {}})),
            tool("Edit", json!({"file_path": {}, "old_string": {}})),
        ];
        assert_eq!(
            called(write.clone(), &claude).1,
            json!({"file_path": "/w/a", "content": "x\ny\n"})
        );
        let opencode = [
            tool("write", json!({"filePath": {}})),
            tool("edit", json!({"filePath": {}, "oldString": {}, "newString": {}})),
        ];
        assert_eq!(
            called(write.clone(), &opencode).1,
            json!({"filePath": "/w/a", "content": "x\ny\n"})
        );
        let edit = json!({"edit": {"path": "/w/a", "old": "x", "new": "z"}});
        assert_eq!(
            called(edit.clone(), &opencode).1,
            json!({"filePath": "/w/a", "oldString": "x", "newString": "z"})
        );
        let patch = Tool { kind: ToolKind::Custom, ..tool("apply_patch", json!({})) };
        let codex = [tool("exec_command", json!({"cmd": {}})), patch];
        let added = "*** Begin Patch\n*** Add File: /w/a\n+x\n+y\n*** End Patch";
        assert_eq!(called(write.clone(), &codex), ("apply_patch".to_owned(), json!(added)));
        let updated = "*** Begin Patch\n*** Update File: /w/a\n@@\n-x\n+z\n*** End Patch";
        assert_eq!(called(edit.clone(), &codex).1, json!(updated));
        let replaced = "OLD='x' NEW='z' perl -0pi -e 's/\\Q$ENV{OLD}\\E/$ENV{NEW}/' '/w/a'";
        assert_eq!(called(edit, &codex[..1]).1, json!({ "cmd": replaced }));
        assert_eq!(
            called(json!({"read": "/w/it's"}), &codex[..1]).1,
            json!({"cmd": "cat '/w/it'\\''s'"})
        );
        assert_eq!(
            called(write, &codex[..1]).1["cmd"],
            "mkdir -p \"$(dirname '/w/a')\" && printf %s 'x\ny\n' > '/w/a'"
        );
    }

    #[test]
    fn mcp_tool_is_found_under_every_name() {
        let step = json!({"tool": {"name": "mcp__memory__read_graph", "input": {"a": 1}}});
        let namespaced =
            Tool { namespace: Some("mcp__memory".into()), ..tool("read_graph", json!({})) };
        for (tools, name) in [
            (vec![], "mcp__memory__read_graph"),
            (vec![tool("mcp__memory__read_graph", json!({}))], "mcp__memory__read_graph"),
            (vec![tool("memory_read_graph", json!({}))], "memory_read_graph"),
            (vec![tool("mcp_memory_read_graph", json!({}))], "mcp_memory_read_graph"),
            (vec![namespaced], "mcp__memory/read_graph"),
        ] {
            assert_eq!(called(step.clone(), &tools), (name.to_owned(), json!({"a": 1})));
        }
    }
}
