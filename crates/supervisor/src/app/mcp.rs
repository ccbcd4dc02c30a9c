//! The MCP servers of a session: Harvest's own tools, the servers to which the gateway adds a key,
//! the stock servers that the image contains, and those of the repositories.

use std::{io, io::Read, path::Path};

use harvest_proto::{
    McpServerName,
    door::{MCP_NAME, mcp_url},
};
use serde_json::{Map, Value, json};

use super::Servers;
use crate::{resolve, users::User};

/// Files of a repository that list servers; a later one wins.
pub(crate) const FILES: [&str; 2] = [".mcp.json", ".harvest/mcp.json"];

// Of all servers of the repositories together. Codex gets them as one argument of a program, which
// the kernel limits to 128 KiB.
const MAX_BYTES: usize = 32 * 1024;

/// The servers by name, and warnings about files that cannot be used.
pub(super) fn servers(
    checkouts: &[String],
    user: &User,
    at_the_door: &[McpServerName],
    installed: impl Fn(&str) -> bool,
) -> (Servers, Vec<String>) {
    let (mut servers, mut warnings, mut space) = (stock(installed), Vec::new(), MAX_BYTES);
    for path in
        checkouts.iter().flat_map(|checkout| FILES.map(|file| Path::new(checkout).join(file)))
    {
        match read(&path, user, &mut space) {
            Ok(found) => servers.extend(found),
            Err(why) => {
                let message = format!("{} is not used: {why}", path.display());
                warnings.push(message);
            }
        }
    }
    // Last: a repository cannot take their names.
    let own = ("harvest".to_owned(), format!("http://{MCP_NAME}/mcp"));
    let others = at_the_door.iter().map(|name| (name.to_string(), mcp_url(name)));
    for (name, url) in others.chain([own]) {
        servers.insert(name, json!({ "type": "http", "url": url }));
    }
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

/// The servers of one file; none if there is no such file. The file comes from a repository, and
/// its user may change it at any time.
fn read(path: &Path, user: &User, space: &mut usize) -> Result<Servers, String> {
    let text = match user.access(|| read_text(path)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Map::new()),
        read => read.map_err(|error| error.to_string())?,
    };
    let left = space.checked_sub(text.len());
    *space = left.ok_or_else(|| format!("the lists of servers exceed {MAX_BYTES} bytes"))?;
    let mut parsed: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    match parsed.get_mut("mcpServers").map(Value::take) {
        Some(Value::Object(servers)) if servers.values().all(Value::is_object) => Ok(servers),
        _ => Err("it has no object `mcpServers` of objects".to_owned()),
    }
}

fn read_text(path: &Path) -> io::Result<String> {
    let (mut text, limit) = (String::new(), MAX_BYTES as u64 + 1);
    resolve::open_regular(path)?.take(limit).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn me() -> User {
        let (uid, gid) = (nix::unistd::Uid::current(), nix::unistd::Gid::current());
        User { name: "me".into(), uid: uid.as_raw(), gid: gid.as_raw(), home: "/".into() }
    }

    #[test]
    fn servers_are_read_with_the_users_rights() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let hidden = folder.path().join("hidden.json");
        fs::write(&hidden, r#"{"mcpServers": {"a": {"command": "secret"}}}"#).unwrap();
        fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&hidden, folder.path().join(".mcp.json")).unwrap();
        let other = User { uid: 10_001, gid: 10_001, ..me() };
        let checkouts = [folder.path().display().to_string()];
        let (found, warnings) = servers(&checkouts, &other, &[], |_| false);
        assert_eq!((found.len(), warnings.len()), (1, 1), "{found:?}");
    }

    #[test]
    fn long_lists_are_left_out_with_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let nested = format!("{}0{}", "[".repeat(100), "]".repeat(100));
        let long = vec![nested; MAX_BYTES / 200].join(",");
        let text = format!(r#"{{"mcpServers": {{"a": {{"command": [{long}]}}}}}}"#);
        fs::write(folder.path().join(".mcp.json"), text).unwrap();
        let (found, warnings) =
            servers(&[folder.path().display().to_string()], &me(), &[], |_| false);
        assert_eq!((found.len(), warnings.len()), (1, 1));
    }

    #[test]
    fn repository_servers_join_installed_ones() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(".harvest")).unwrap();
        let write = |file: &str, text: &str| fs::write(folder.path().join(file), text).unwrap();
        write(".mcp.json", r#"{"mcpServers": {"a": {"command": "one"}, "b": {"command": "b"}}}"#);
        let own = r#"{"mcpServers": {"a": {"command": "two"}, "harvest": {"command": "false"}, "github": {}}}"#;
        let door = ["github".parse().unwrap()];
        write(".harvest/mcp.json", own);
        let (servers, warnings) =
            servers(&[folder.path().display().to_string()], &me(), &door, |name| {
                name == "playwright-mcp"
            });
        assert_eq!(
            servers.keys().collect::<Vec<_>>(),
            ["a", "b", "github", "harvest", "playwright"]
        );
        assert_eq!(servers["github"]["url"], "http://mcp.harvest.internal/github");
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
            let (servers, warnings) =
                servers(&[folder.path().display().to_string()], &me(), &[], |_| false);
            assert_eq!((servers.len(), warnings.len()), (1, 1), "{text}");
        }
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path).unwrap();
        assert_eq!(
            servers(&[folder.path().display().to_string()], &me(), &[], |_| false).1.len(),
            1
        );
    }
}
