//! Git's configuration for public repositories: their URLs become those of the git door, also when
//! a program like pip, npm or cargo runs git.

use harvest_proto::door::public_git_url;

/// The system configuration: the image's own, and the hosts.
pub(crate) fn git_config(hosts: &[String]) -> String {
    let host = |host: &String| {
        let door = public_git_url(host);
        let urls = [
            format!("https://{host}/"),
            format!("git@{host}:"),
            format!("ssh://git@{host}/"),
            format!("git://{host}/"),
        ];
        let lines = urls.map(|url| format!("\tinsteadOf = \"{url}\"\n"));
        format!("[url \"{door}/\"]\n{}", lines.concat())
    };
    let hosts: String = hosts.iter().map(host).collect();
    format!("[include]\n\tpath = /etc/gitconfig\n{hosts}")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn urls_of_public_hosts_lead_to_the_door() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gitconfig");
        std::fs::write(&file, git_config(&["github.com".to_owned()])).unwrap();
        for (url, expected) in [
            ("https://github.com/a/b", "http://git.harvest.internal/public/github.com/a/b"),
            ("git@github.com:a/b.git", "http://git.harvest.internal/public/github.com/a/b.git"),
            ("ssh://git@github.com/a/b", "http://git.harvest.internal/public/github.com/a/b"),
            ("https://github.com.evil.org/a", "https://github.com.evil.org/a"),
        ] {
            let mut git = Command::new("git");
            git.args(["ls-remote", "--get-url", url]).current_dir(folder.path());
            git.env("GIT_CONFIG_SYSTEM", &file).env("HOME", folder.path());
            let output = git.env("GIT_CONFIG_GLOBAL", "/dev/null").output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected);
        }
    }
}
