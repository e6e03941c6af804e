{{- define "diptych.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "diptych.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name }}
{{- .Release.Name }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name }}
{{- end }}
{{- end }}

{{/* Name of the objects of one pool, or of one model's router: (root, role, name). A name is never cut: two could meet. */}}
{{- define "diptych.objectName" -}}
{{- $name := printf "%s-%s-%s" (include "diptych.fullname" .root) .role .name }}
{{- if gt (len $name) 63 }}
{{- fail (printf "the name %s has %d characters, Kubernetes takes 63: shorten the release, fullnameOverride, pool or model" $name (len $name)) }}
{{- end }}
{{- $name }}
{{- end }}

{{/* Labels that never change, for selectors: (root, role, name), or only (root, role), or only (root). */}}
{{- define "diptych.selectorLabels" -}}
app.kubernetes.io/name: {{ include "diptych.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .name }}
diptych/pool: {{ . }}
{{- end }}
{{- end }}

{{/* Every label: (root) and optionally role, name, model. */}}
{{- define "diptych.labels" -}}
{{ include "diptych.selectorLabels" . }}
{{- with .model }}
diptych/model: {{ . }}
{{- end }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: diptych
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "diptych.serviceAccountName" -}}
{{- $account := index .root.Values.serviceAccount .kind }}
{{- if $account.create }}
{{- $account.name | default (printf "%s-%s" (include "diptych.fullname" .root) .kind) }}
{{- else }}
{{- $account.name | default "default" }}
{{- end }}
{{- end }}

{{- define "diptych.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "diptych.fullname" .)) }}
{{- else }}
{{- .Values.tls.existingSecret }}
{{- end }}
{{- end }}

{{- define "diptych.scheme" -}}
{{- if include "diptych.tlsSecret" . }}https{{ else }}http{{ end }}
{{- end }}

{{- define "diptych.image" -}}
{{- $image := index .root.Values.images .kind }}
{{- if $image.digest }}
{{- printf "%s@%s" $image.repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/* Stops with a sentence when something that was asked for needs an API that the cluster does not have: (root, api, for). */}}
{{- define "diptych.requireAPI" -}}
{{- if not (.root.Capabilities.APIVersions.Has .api) }}
{{- fail (printf "%s needs the API %s, which this cluster does not have (helm template: add --api-versions %s)" .for .api .api) }}
{{- end }}
{{- end }}
