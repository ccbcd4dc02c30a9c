//! The MCP servers of a session: Harvest's own tools, the stock servers that the image contains,
//! and those of the repositories.

use std::{fs, io::Read, path::Path};

use harvest_proto::door::MCP_NAME;
use serde_json::{Map, Value, json};

use super::Servers;

/// Files of a repository that list servers; a later one wins.
const FILES: [&str; 2] = [".mcp.json", ".harvest/mcp.json"];

// The files come from repositories.
const MAX_BYTES: u64 = 256 * 1024;

/// The servers by name, and warnings about files that cannot be used.
pub(super) fn servers(
    checkouts: &[String],
    installed: impl Fn(&str) -> bool,
) -> (Servers, Vec<String>) {
    let (mut servers, mut warnings) = (stock(installed), Vec::new());
    for path in
        checkouts.iter().flat_map(|checkout| FILES.map(|file| Path::new(checkout).join(file)))
    {
        match read(&path) {
            Ok(found) => servers.extend(found),
            Err(why) => {
                let message = format!("{} is not used: {why}", path.display());
                warnings.push(message);
            }
        }
    }
    // Last: a repository cannot take the name of Harvest's tools.
    let url = format!("http://{MCP_NAME}/mcp");
    servers.insert("harvest".to_owned(), json!({ "type": "http", "url": url }));
    (servers, warnings)
}

/// The servers of the image `full`, which use Debian's Chromium.
fn stock(installed: impl Fn(&str) -> bool) -> Servers {
    let all = json!({
        "filesystem": { "command": "mcp-server-filesystem", "args": ["/workspace"] },
        "playwright": {
            "command": "playwright-mcp",
            "args": [
                "--headless", "--isolated", "--no-sandbox",
                "--executable-path", "/usr/bin/chromium", "--output-dir", "/tmp/playwright",
            ],
        },
        "devtools": {
            "command": "chrome-devtools-mcp",
            "args": [
                "--headless", "--isolated", "--chromeArg=--no-sandbox",
                "--executablePath", "/usr/bin/chromium", "--no-usage-statistics",
            ],
            // It would ask the registry for a newer version of itself.
            "env": { "CHROME_DEVTOOLS_MCP_NO_UPDATE_CHECKS": "1" },
        },
    });
    let Value::Object(mut servers) = all else { return Map::new() };
    servers.retain(|_, server| server["command"].as_str().is_some_and(&installed));
    servers
}

/// The servers of one file; none if there is no such file.
fn read(path: &Path) -> Result<Servers, String> {
    // A link could lead to a device that never ends, or out of the repository.
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => {}
        Ok(_) => return Err("it is not a regular file".to_owned()),
        Err(_) => return Ok(Map::new()),
    }
    let mut text = String::new();
    let read = fs::File::open(path).and_then(|file| file.take(MAX_BYTES).read_to_string(&mut text));
    read.map_err(|error| error.to_string())?;
    let mut parsed: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    match parsed.get_mut("mcpServers").map(Value::take) {
        Some(Value::Object(servers)) if servers.values().all(Value::is_object) => Ok(servers),
        _ => Err("it has no object `mcpServers` of objects".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_servers_join_installed_ones() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(".harvest")).unwrap();
        let write = |file: &str, text: &str| fs::write(folder.path().join(file), text).unwrap();
        write(".mcp.json", r#"{"mcpServers": {"a": {"command": "one"}, "b": {"command": "b"}}}"#);
        let own = r#"{"mcpServers": {"a": {"command": "two"}, "harvest": {"command": "false"}}}"#;
        write(".harvest/mcp.json", own);
        let (servers, warnings) =
            servers(&[folder.path().display().to_string()], |name| name == "playwright-mcp");
        assert_eq!(servers.keys().collect::<Vec<_>>(), ["a", "b", "harvest", "playwright"]);
        let tools = json!({ "type": "http", "url": "http://mcp.harvest.internal/mcp" });
        assert_eq!(servers["harvest"], tools);
        assert_eq!((servers["a"]["command"].as_str(), warnings.len()), (Some("two"), 0));
    }

    #[test]
    fn unusable_file_is_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".mcp.json");
        for text in ["", "[]", r#"{"mcpServers": []}"#, r#"{"mcpServers": {"a": 1}}"#] {
            fs::write(&path, text).unwrap();
            let (servers, warnings) = servers(&[folder.path().display().to_string()], |_| false);
            assert_eq!((servers.len(), warnings.len()), (1, 1), "{text}");
        }
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path).unwrap();
        assert_eq!(servers(&[folder.path().display().to_string()], |_| false).1.len(), 1);
    }
}
