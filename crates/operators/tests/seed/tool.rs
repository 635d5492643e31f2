//! Failures of the restore tool that are not caused by the backup.

use std::os::unix::fs::PermissionsExt as _;

use super::*;

use restore::reason::Trouble;

/// The problem that `prepare` reports if a shell script with these commands replaces the restore tool.
async fn trouble_after_tool(does: &str) -> Trouble {
    let world = World::new("3.6").await;
    fetch(&world.fetch()).await.unwrap();
    let mut arguments = world.prepare("http://127.0.0.1:1");
    let tool = world.volume.path().join("tool");
    std::fs::write(&tool, format!("#!/bin/sh\n{does}\n")).unwrap();
    std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
    arguments.settings.tool = tool;
    prepare(&arguments).unwrap_err()
}

#[tokio::test]
async fn killed_restore_tool_is_not_reported_as_damaged_backup() {
    let trouble = trouble_after_tool("kill -9 $$").await;
    assert_eq!(trouble.reason, Reason::PodNotStarting);
    assert!(trouble.message.contains("signal 9"), "{}", trouble.message);
}

/// All restore tools print this error on a full volume.
#[tokio::test]
async fn full_volume_is_not_reported_as_damaged_backup() {
    let full = "echo Error: write db: no space left on device >&2; exit 1";
    let trouble = trouble_after_tool(full).await;
    assert_eq!(trouble.reason, Reason::SeedFailed);
    assert!(
        trouble.message.contains("larger volumes"),
        "{}",
        trouble.message
    );
}
